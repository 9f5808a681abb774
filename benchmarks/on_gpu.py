"""How long do whole fits of a workload of the proof take on a GPU, validation included?

The methods take turns, seed by seed, in one process, after a short run that does not count. Printed are, for each run,
the metric of the last validation, the seconds of `Trainer.fit` and their share of the plain run's with the same seed,
and then the mean over the seeds. ``shortened`` is the plain run made as short as the cached one took. Give it behind
both.

    python -m benchmarks.on_gpu WORKLOAD --data FOLDER [--size full] [--methods plain freezing cached shortened]
        [--seeds 0 1 2] [--set data.num_workers=8 ...] [--out FILE]
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.proof.run import about, run
from benchmarks.proof.workloads import WORKLOADS


def main() -> None:
    """Train, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="full")
    parser.add_argument("--methods", nargs="+", default=["plain", "freezing", "cached", "shortened"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="overrides of the configuration")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    overrides = [f"trainer.accelerator={'gpu' if torch.cuda.is_available() else 'cpu'}", *options.overrides]
    metric = WORKLOADS[options.workload].metric
    print(options.workload, options.size, *overrides, about(), flush=True)
    run(options.workload, options.size, "plain", 0, options.data, steps=20, overrides=overrides)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in options.methods}
    for seed in options.seeds:
        for method in options.methods:
            steps = None
            if method == "shortened":
                plain, ours = found["plain"][-1], found["cached"][-1]
                steps = max(1, min(plain["steps"], round(plain["steps"] * ours["fit_seconds"] / plain["fit_seconds"])))
            done = run(options.workload, options.size, method, seed, options.data, steps, overrides=overrides)
            done["command"] = f"python -m benchmarks.on_gpu {options.workload} --size {options.size} --data FOLDER"
            done["command"] += f" --set {' '.join(options.overrides)}" if options.overrides else ""
            found[method].append(done)
            share = done["fit_seconds"] / found["plain"][-1]["fit_seconds"]
            depths = [f"{event['depth']} at step {event['step']}" for event in done["events"]]
            value = 100 * done["curve"][-1]["metrics"][metric]
            print(f"{method:12s} {seed} {value:6.2f} {done['fit_seconds']:8.2f} s {share:6.3f} {depths}", flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(done) + "\n")
    for method, runs in found.items():
        values = [100 * one["curve"][-1]["metrics"][metric] for one in runs]
        shares = [one["fit_seconds"] / plain["fit_seconds"] for one, plain in zip(runs, found["plain"], strict=True)]
        print(f"{method:12s} {statistics.mean(values):6.2f} {statistics.mean(shares):6.3f}")


if __name__ == "__main__":
    main()
