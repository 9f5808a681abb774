"""What the default arguments cost on fine-tuning tasks: runs with freezing and the cache, minus plain runs of the seed.

    python -m benchmarks.proof.defaults                    # the table, from the files of the runs
    python -m benchmarks.proof.defaults --data FOLDER      # makes the runs that are missing first, three seeds of each

`pretrained=True` is the one argument that is set (`conf/callbacks/finetuning.yaml`). Time is by the clock of the step,
beside other work; the tables of each workload compare times.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.proof.figures import with_interval
from benchmarks.proof.workloads import RESULTS, WORKLOADS, keep, result_path

TASKS = (
    ("trashnet_efficientnet", "small"),
    ("cifar10_efficientnet", "small"),
    ("cifar10_efficientnet", "tiny"),
    ("imagenette_efficientnet", "small"),
    ("banking77_minilm", "small"),
    ("newsgroups_minilm", "small"),
    ("camvid_efficientnet", "small"),
)
SEEDS = range(3)
PUBLISHED = RESULTS / "defaults.md"


def path_of(workload: str, size: str, seed: int) -> Path:
    return RESULTS / "defaults" / f"{workload}-{size}-{seed}.json"


def final(path: Path, metric: str) -> tuple[dict[str, Any], float]:
    """A run, and its final metric in points."""
    run = json.loads(path.read_text())
    return run, 100 * run["curve"][-1]["metrics"][metric]


def table() -> str:
    """Markdown; each row a task."""
    rows = ["| task | seeds | plain | default arguments | difference | frozen |", "|---|---:|---:|---:|---:|---|"]
    for workload, size in TASKS:
        metric = WORKLOADS[workload].metric
        plain, ours, depths, modules = [], [], set(), 0
        for seed in SEEDS:
            if (path := path_of(workload, size, seed)).exists():
                run, value = final(path, metric)
                ours.append(value)
                plain.append(final(result_path(workload, size, "plain", seed), metric)[1])
                depths.add(run["events"][-1]["depth"] if run["events"] else 0)
                modules = max(modules, len(run["layer_modules"]))
        if not ours:
            continue
        over = [a - b for a, b in zip(ours, plain, strict=True)]
        frozen = f"{'-'.join(map(str, sorted({min(depths), max(depths)})))} of {modules}" if max(depths) else "nothing"
        rows.append(
            f"| {workload} {size} | {len(ours)} | {with_interval(plain, '.1f')} | {with_interval(ours, '.1f')} "
            f"| {with_interval(over, '+z.1f')} | {frozen} |"
        )
    return "\n".join([*rows, ""])


def main() -> None:
    """Make the runs that are missing, one at a time, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with the data sets")
    options = parser.parse_args()
    for workload, size in TASKS if options.data else ():
        for seed in SEEDS:
            if not (path := path_of(workload, size, seed)).exists():
                run = [workload, "cached", f"{seed}", "--size", size, "--data", options.data, "--out", f"{path}"]
                subprocess.run([sys.executable, "-m", "benchmarks.proof.run", *run], check=True)
    keep(PUBLISHED, table())
    print(table())


if __name__ == "__main__":
    main()
