"""How much of a cluster do iterations use, scheduled by gangs or by JigSaw, with and without partial backprop?

Jobs arrive as in Microsoft's Philly trace (``--philly``, ``traces/philly.csv`` of the Pollux artifact), or at random.
Each follows the costs that `iteration_costs.py` has measured of a network: forward, backward and memory by depth. A
device has twice the memory that the largest of them takes, by `--memory`. Efficiency counts device-seconds of full
backprop, so partial backprop can bring it above 1. The ceiling has no gap and every job at its floor.

    python -m benchmarks.jigsaw [--philly FILE] [--costs FILE ...] [--jobs 300] [--devices 64] [--floor 0.5] [--load 2]
        [--memory 0.5] [--seeds 3]
"""

import argparse
import dataclasses
import json
import random
from pathlib import Path
from statistics import mean

from benchmarks.scheduling.iterations import IterationCost, IterationJob, ceiling, run_gangs
from benchmarks.scheduling.jigsaw import run_rounds
from lightning_egeria.cluster.workloads import read_philly

COSTS = Path(__file__).parent / "iteration_costs"
PUBLISHED = 0.28  # most that JigSaw adds to a cluster's efficiency, by its paper
SHORTEST_S, LONGEST_S = 60, 24 * 3600
SCHEDULERS = {
    "gangs, first come first served": run_gangs,
    "gangs, shortest remaining first": lambda jobs, devices: run_gangs(jobs, devices, shortest_first=True),
    "JigSaw": run_rounds,
}


def arrivals_of(philly: Path | None, jobs: int, devices: int, seed: int) -> list[tuple[float, float, int]]:
    """Seconds of arrival and duration, and the gang, of each job."""
    if philly is None:
        chosen, time, arrivals = random.Random(seed), 0.0, []
        for _ in range(jobs):
            time += chosen.expovariate(devices / 10_000)
            duration = min(LONGEST_S, SHORTEST_S + chosen.lognormvariate(6.5, 1.3))
            arrivals.append((time, duration, chosen.choice((1, 1, 1, 2, 2, 4, 4, 8, 8, 16))))
        return arrivals
    trace = [job for job in read_philly(philly) if SHORTEST_S <= job[1] <= LONGEST_S and job[2] <= devices]
    start = random.Random(seed).randrange(len(trace) - jobs)
    window = trace[start : start + jobs]
    return [(time - window[0][0], duration, gang) for time, duration, gang in window]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--philly", type=Path)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--floor", type=float, default=0.5)
    parser.add_argument("--load", type=float, default=2.0, help="full backprop that arrives, by what devices can do")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.5, help="share of a device that the largest job takes")
    parser.add_argument("--costs", type=Path, nargs="+", default=sorted(COSTS.glob("*.json")), metavar="FILE")
    options = parser.parse_args()
    device_bytes = max(max(json.loads(path.read_text())["bytes"]) for path in options.costs) / options.memory
    costs = [IterationCost.read(path, device_bytes) for path in options.costs]
    gains = []
    for seed in range(options.seeds):
        chosen = random.Random(seed)
        arrivals = arrivals_of(options.philly, options.jobs, options.devices, seed)
        span = sum(duration * gang for _, duration, gang in arrivals) / (options.load * options.devices)
        partial = []
        for number, (time, duration, gang) in enumerate(arrivals):
            cost = chosen.choice(costs)
            iterations = max(1, round(duration / cost.full_s))
            partial.append(
                IterationJob(f"{number}", time * span / arrivals[-1][0], gang, iterations, cost, options.floor)
            )
        full = [dataclasses.replace(job, floor=1.0) for job in partial]
        print(f"\nseed {seed}: ceiling {ceiling(full):.2f} full, {ceiling(partial):.2f} partial")
        print("| | full: efficiency | average completion | partial: efficiency | average completion | mean depth |")
        print("|---|---|---|---|---|---|")
        reached = {}
        for name, scheduler in SCHEDULERS.items():
            whole, part = (scheduler(jobs, options.devices) for jobs in (full, partial))
            print(
                f"| {name} | {whole.efficiency:.3f} | {whole.average_completion_s:.0f} s | {part.efficiency:.3f} | "
                f"{part.average_completion_s:.0f} s | {mean(part.mean_depth.values()):.2f} |",
                flush=True,
            )
            reached[name] = whole.efficiency, part.efficiency
        gangs = max(whole for name, (whole, _) in reached.items() if name != "JigSaw")
        gains.append([efficiency / gangs - 1 for efficiency in reached["JigSaw"]])
        print(f"JigSaw over the better gangs with full backprop: {gains[-1][0]:+.0%} full, {gains[-1][1]:+.0%} partial")
    whole, part = (mean(column) for column in zip(*gains, strict=True))
    print(f"\nmean: {whole:+.0%} with full backprop, {part:+.0%} with partial; published: up to {PUBLISHED:+.0%}")


if __name__ == "__main__":
    main()
