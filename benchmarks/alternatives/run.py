"""One run of a task by one method; its result is a line at the end of a file that is only added to.

    python -m benchmarks.alternatives.run trashnet ours --rate 3e-4 --seed 0 --data FOLDER
    python -m benchmarks.alternatives.run trashnet --data FOLDER          # all methods: rates, then three seeds

The learning rate of a method is the one of the task's with the best accuracy on a part of the training set that is not
trained on (``--choosing``), with seed 100; the figures are measured on the validation set, with seeds 0 to 2. A run
beside which others used the machine says so (`quiet`), and its accuracy counts, but not its time.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch

from benchmarks.alternatives.methods import METHODS, Run
from benchmarks.alternatives.tasks import TASKS, silent_trainer
from benchmarks.proof.run import about, quiet
from lightning_egeria import KnowledgeGuidedFreezing

RESULTS = Path(__file__).parents[1] / "proof" / "results" / "alternatives"
CHOOSING_SEED = 100
QUIET_LOAD = 1.5  # processes that want to run, on average of the last minute
# Methods that train as another one does, so its rate is theirs.
AS_OTHERS = {
    "shortened": "plain",
    "lora_third_cached": "lora_third",
    "half_cached": "by_hand",
    "ours_selective": "ours_tuned",
}
OURS = "ours_tuned"  # the shortened plain run takes its time


class Accuracies(lightning.Callback):
    """Seconds and CPU seconds since the run began, and the accuracy, at each validation."""

    def __init__(self) -> None:
        self.began, self.cpu_began = time.perf_counter(), time.process_time()
        self.points: list[dict[str, float]] = []

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.points.append(
            {
                "seconds": round(time.perf_counter() - self.began, 2),
                "cpu_seconds": round(time.process_time() - self.cpu_began, 2),
                "accuracy": round(float(trainer.callback_metrics["accuracy"]), 4),
            }
        )


def trained(task: str, method: str, rate: float, seed: int, data: Path, choosing: bool, steps: int | None) -> dict:
    """What is kept of one run."""
    lightning.seed_everything(seed, workers=True, verbose=False)
    accuracies: list[Accuracies] = []
    frozen: list[str] = []  # by us
    epochs = TASKS[task].epochs

    def fit(module: lightning.LightningModule, samples: Any, *callbacks: Any, **changes: Any) -> None:
        length = {"max_epochs": epochs} | changes
        trainer = silent_trainer(**length, callbacks=[*callbacks, accuracies[0]])
        trainer.fit(module, datamodule=samples)
        for one in callbacks:
            if isinstance(one, KnowledgeGuidedFreezing):
                frozen.extend(f"{event.depth} of {len(one.layer_modules)} at step {event.step}" for event in one.events)
        if not accuracies[0].points or trainer.max_epochs == -1:
            trainer.validate(module, datamodule=samples, verbose=False)

    with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = Run(TASKS[task], data, rate, fit, choosing, steps)
        run.module()  # files of weights are in the page cache for all methods
        accuracies.append(Accuracies())
        METHODS[method].train(run)
    points = accuracies[0].points
    spent, cpu = (time.perf_counter() - accuracies[0].began, time.process_time() - accuracies[0].cpu_began)
    told = f" --steps {steps}" if steps is not None else ""
    held = " --choosing" if choosing else ""
    return {
        "task": task,
        "method": method,
        "rate": rate,
        "seed": seed,
        "choosing": choosing,
        "accuracy": points[-1]["accuracy"],
        "seconds": round(spent, 2),
        "cpu_seconds": round(cpu, 2),
        "quiet": os.getloadavg()[0] < QUIET_LOAD,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "points": points,
        "steps": steps,
        "lines": METHODS[method].lines,
        "frozen": frozen,
        "command": f"python -m benchmarks.alternatives.run {task} {method} --rate {rate:g} --seed {seed}{told}{held} "
        "--data FOLDER",
        "about": about() | {"cores_allowed": str(len(os.sched_getaffinity(0)))},
    }


def results(task: str) -> list[dict[str, Any]]:
    """All that is kept of a task, oldest first."""
    path = RESULTS / f"{task}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def chosen_rate(task: str, method: str, kept: list[dict[str, Any]]) -> float | None:
    """The rate with the best accuracy on what is held out of the training set; None if not all were tried."""
    method = AS_OTHERS.get(method, method)
    tried = {one["rate"]: one["accuracy"] for one in kept if one["method"] == method and one["choosing"]}
    rates = [METHODS[method].scale * rate for rate in TASKS[task].rates]
    return max(rates, key=lambda rate: tried[rate]) if all(rate in tried for rate in rates) else None


def final(task: str, method: str, kept: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The latest run of each seed at the chosen rate."""
    rate = chosen_rate(task, method, kept)
    return {one["seed"]: one for one in kept if one["method"] == method and not one["choosing"] and one["rate"] == rate}


def steps_of_ours(task: str, kept: list[dict[str, Any]]) -> int:
    """Steps of a plain run that takes as long as ours."""
    cost = {
        method: statistics.median(one["cpu_seconds"] for one in final(task, method, kept).values())
        for method in ("plain", OURS)
    }
    whole = TASKS[task].epochs * (TASKS[task].train_size // TASKS[task].batch_size)
    return max(1, round(whole * cost[OURS] / cost["plain"]))


def add(arguments: list[str]) -> None:
    """Run in a process of its own."""
    subprocess.run([sys.executable, "-m", "benchmarks.alternatives.run", *arguments], check=True)


def all_of(task: str, methods: list[str], data: Path, seeds: int, only_choosing: bool) -> None:
    """What is not there yet, one run at a time; the methods take turns."""
    for method in methods:
        for rate in [] if method in AS_OTHERS else [METHODS[method].scale * one for one in TASKS[task].rates]:
            if not any(one["method"] == method and one["choosing"] and one["rate"] == rate for one in results(task)):
                add(
                    [
                        task,
                        method,
                        "--rate",
                        f"{rate!r}",
                        "--seed",
                        f"{CHOOSING_SEED}",
                        "--choosing",
                        "--data",
                        f"{data}",
                    ]
                )
    for seed in range(0 if only_choosing else seeds):
        for method in sorted(methods, key="shortened".__eq__):
            kept = results(task)
            rate = chosen_rate(task, method, kept)
            if seed in final(task, method, kept) or rate is None:
                continue
            steps = [f"--steps={steps_of_ours(task, kept)}"] if method == "shortened" else []
            add([task, method, f"--rate={rate!r}", f"--seed={seed}", *steps, f"--data={data}"])


def main() -> None:
    """Run and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("method", nargs="*", help="one for a single run; several, or none for all, for what is missing")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--choosing", action="store_true", help="validate on a part of the training set")
    parser.add_argument("--only-choosing", action="store_true", help="choose rates and stop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    task = TASKS[options.task]
    if unknown := set(options.method) - set(METHODS):
        parser.error(f"no method {min(unknown)!r}; there are {', '.join(METHODS)}")
    if options.rate is None:
        methods = options.method or [name for name, one in METHODS.items() if task.is_text or not one.text_only]
        all_of(options.task, methods, options.data, options.seeds, options.only_choosing)
        return
    (method,) = options.method
    torch.set_float32_matmul_precision("highest")
    kept = trained(options.task, method, options.rate, options.seed, options.data, options.choosing, options.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{options.task}.jsonl").open("a") as file:
        file.write(json.dumps(kept) + "\n")
    print(
        f"{kept['accuracy']:.2%} {kept['seconds']:.1f} s, {kept['cpu_seconds']:.1f} CPU s: {kept['command']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
