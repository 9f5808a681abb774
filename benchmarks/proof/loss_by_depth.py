"""What each frozen depth has cost in each fine-tuning task: the curve that `loss_limits` is read off.

    python -m benchmarks.proof.loss_by_depth

It reads the files of the runs and trains nothing. Runs count that stay at one depth from the first two steps, or from
the end of a trial, to the last step.
"""

import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import hydra
from torch import nn

from benchmarks.proof.figures import with_interval
from benchmarks.proof.run import configured
from benchmarks.proof.workloads import FIXED, FROZEN, RESULTS, WORKLOADS, keep

PUBLISHED = RESULTS / "loss_by_depth.md"
MOSTLY = 0.9  # share of the steps at the depth


def depth_of(run: Mapping[str, Any]) -> int | None:
    """Depth at which nearly all steps of a run were taken; None if there is none, or another method trained it."""
    fixed = FROZEN.fullmatch(run["method"])
    if run["method"] not in ("freezing", "cached", *FIXED) and (fixed is None or fixed["percent"] is not None):
        return None
    steps: dict[int, float] = defaultdict(float)
    for kind, count in run["curve"][-1]["batches"].items():
        steps[int(kind.split()[0])] += count
    depth = max(steps, key=steps.__getitem__)
    return depth if depth and steps[depth] >= MOSTLY * sum(steps.values()) else None


@functools.cache
def shares_of_weights(workload: str, names: tuple[str, ...]) -> list[float]:
    """Share of the chain's weights in the first layer modules, from 0 to all; tables of embeddings do not count."""
    files = [override.partition("=")[0] for override in WORKLOADS[workload].overrides if "weights=" in override]
    module = hydra.utils.instantiate(configured(workload, "full", "", [f"{file}=null" for file in files]).model)
    parts = [module.get_submodule(name) for name in names]
    sizes = [0 if isinstance(part, nn.Embedding) else sum(one.numel() for one in part.parameters()) for part in parts]
    return [sum(sizes[:depth]) / sum(sizes) for depth in range(len(sizes) + 1)]


def losses_of(workload: str, size: str) -> Iterator[tuple[int, float, list[float]]]:
    """Yield depth, share of the weights, and the differences to the plain run of the same seed, in points."""
    metric = WORKLOADS[workload].metric
    plain: dict[int, float] = {}
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    names: list[str] = []
    for path in sorted((RESULTS / workload / size).glob("*-*.json")):
        run = json.loads(path.read_text())
        final = 100 * run["curve"][-1]["metrics"].get(metric, float("nan"))
        if run["method"] == "plain":
            plain[run["seed"]] = final
        elif (depth := depth_of(run)) is not None:
            found[depth][run["seed"]].append(final)
            names = run["layer_modules"]
    if not found:
        return
    shares = shares_of_weights(workload, tuple(names))
    for depth, finals in sorted(found.items()):
        differences = [statistics.fmean(finals[seed]) - plain[seed] for seed in sorted(finals) if seed in plain]
        if differences:
            yield depth, shares[depth], differences


def table() -> str:
    """All of them, as Markdown. From scratch nothing freezes early enough to count."""
    rows = ["| task | frozen | of the weights | minus plain, points | seeds |", "|---|---:|---:|---:|---:|"]
    for workload in WORKLOADS:
        for folder in sorted(path for path in (RESULTS / workload).glob("*") if path.is_dir()):
            for depth, share, differences in losses_of(workload, folder.name):
                cells = (f"{workload} {folder.name}", str(depth), f"{share:.0%}", with_interval(differences, "+.1f"))
                rows.append(f"| {' | '.join(cells)} | {len(differences)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the table."""
    keep(PUBLISHED, table())
    print(table())


if __name__ == "__main__":
    main()
