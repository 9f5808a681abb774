"""Train a workload by all its methods and seeds, and keep each run in a small file; what is there is not done again.

    python -m benchmarks.proof.compare WORKLOAD --data FOLDER [--size small] [--seeds 0 1 2] [--methods plain ...]
    python -m benchmarks.proof.compare WORKLOAD --data FOLDER --sensitivity

With ``--sensitivity``, ours without the cache is trained with one argument changed at a time.

FOLDER holds the data sets: ``cifar10`` as torchvision stores it, ``imagenette/train/CLASS/*`` and ``imagenette/val``,
``checkpoints/resnet20_cifar10.safetensors``. The plain run and ours come first: what the shortened run may take and how
deep static freezing goes follow from them, and from the cost of the steps, which is measured in between.
"""

import argparse
import subprocess
import sys

from benchmarks.proof import costs
from benchmarks.proof.results import costs_of, read
from benchmarks.proof.workloads import OF_THE_POLICY, SHORTENED, VARIATIONS, WORKLOADS, result_path

FOLLOWERS = (*SHORTENED, "static", "partial smaller")
STEPS_ALLOWED = 0.02  # share of the plain run's by which a shortened run may be longer or shorter than it should be now


def variations(workload: str, size: str) -> list[tuple[str, list[str]]]:
    """Names of the runs with one argument changed, and the override of each."""
    steps = read(result_path(workload, size, "plain", 0)).steps
    found = []
    for argument, values in VARIATIONS.items():
        for value in values:
            owner = "callbacks.freezing.policy" if argument in OF_THE_POLICY else "callbacks.freezing"
            override = f"{owner}.{argument}={value}"
            if argument == "evaluations":
                override = f"callbacks.freezing.evaluate_every_n_steps={max(1, round(steps / int(value)))}"
            found.append((f"{argument}={value}", [override]))
    return found


def arguments_of(method: str, workload: str, size: str, seed: int) -> list[str]:
    """What a run must be told that follows from others of the same seed."""
    if method in SHORTENED or method == "partial smaller":
        plain = read(result_path(workload, size, "plain", seed))
        paths = [result_path(workload, size, name, seed) for name in SHORTENED.get(method, ("partial",))]
        done = [read(path).seconds for path in paths if path.is_file()]
        if not done:
            raise SystemExit(f"how short the run must be follows from ours: {paths[0]} is not there")
        ours = min(done)
        if method == "partial smaller":
            batch = costs.batch_size_of(workload, size, ours / plain.seconds)
            return ["--steps", str(plain.steps), "--batch-size", str(batch)]
        return ["--steps", str(max(1, min(plain.steps, round(plain.steps * ours / plain.seconds))))]
    if method == "static":
        return ["--depth", str(read(result_path(workload, size, "freezing", seed)).final_depth)]
    return []


def is_due(method: str, workload: str, size: str, seed: int) -> bool:
    """Whether a run is not there, or was made as short, or frozen as deep, as ours no longer is."""
    path = result_path(workload, size, method, seed)
    if not path.is_file() or method not in FOLLOWERS:
        return not path.is_file()
    if method == "partial smaller":
        return False  # it costs what it was measured to cost, which the table says
    found, wanted = read(path), int(arguments_of(method, workload, size, seed)[1])
    if method == "static":
        return found.final_depth != wanted
    allowed = STEPS_ALLOWED * read(result_path(workload, size, "plain", seed)).steps
    return abs(found.steps - wanted) > allowed


def train(workload: str, size: str, method: str, seed: int, data: str, more: list[str]) -> None:
    """In a process of its own."""
    print(f"{workload} {size} {method} seed {seed} {' '.join(more)}", flush=True)
    command = [sys.executable, "-m", "benchmarks.proof.run", workload, method, str(seed)]
    subprocess.run([*command, "--size", size, "--data", data, *more], check=True)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--sensitivity", action="store_true")
    options = parser.parse_args()
    name, size = options.workload, options.size
    if options.sensitivity:
        for label, overrides in variations(name, size):
            for seed in options.seeds:
                if not result_path(name, size, label, seed).is_file():
                    train(name, size, "freezing", seed, options.data, ["--label", label, "--set", *overrides])
        costs.measure_missing(name, size, options.data)
        costs_of.cache_clear()
        return
    methods = options.methods or WORKLOADS[name].methods
    for group in ([m for m in methods if m not in FOLLOWERS], [m for m in methods if m in FOLLOWERS]):
        for seed in options.seeds:
            for method in group:
                if is_due(method, name, size, seed):
                    more = arguments_of(method, name, size, seed)
                    train(name, size, method, seed, options.data, more)
        costs.measure_missing(name, size, options.data)
        costs_of.cache_clear()


if __name__ == "__main__":
    main()
