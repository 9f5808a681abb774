"""Freezes and unfreezes for hours in one training, and sees that nothing grows.

    make test-soak ARGS="[--minutes 120]"

Looked at are memory, open files, threads and shared memory of the trainer, memory of the reference's process, and what
the cache takes on disk: the largest of the last quarter beside the largest of the second (the first is for warming up).
From the trainer's memory the list of freezes is taken off, which the callback keeps on purpose: here it has thousands.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from faults.job import CACHE, ByAnswers, Job
from lightning_egeria import KnowledgeGuidedFreezing

CYCLE = (1, 2, 2, 2, 2, 2, 0, 0, 2, 2, 2, 2, 1, 1, 0, 0)  # frozen depth after each answer
LOOKS = 200  # in the whole time
SLACK = {"memory, MB": 8.0, "memory of the worker, MB": 8.0, "on disk, MB": 1.0}  # of others: 0


class Cycles(ByAnswers):
    """Goes round and round."""

    def depth_after(self, answers: int) -> int | None:
        depth, before = (CYCLE[(answers - back) % len(CYCLE)] for back in (0, 1))
        return depth if depth != before else None


class Looks(L.Callback):
    """Notes what the processes hold, and ends training when the time is over."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.found: list[dict[str, float]] = []
        self.began = self.looked = time.monotonic()
        self.events, self.event_bytes = 0, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.monotonic()
        trainer.should_stop = now - self.began > self.seconds
        if now - self.looked < self.seconds / LOOKS:
            return
        self.looked = now
        (freezing,) = (callback for callback in trainer.callbacks if isinstance(callback, KnowledgeGuidedFreezing))
        comparison = freezing.comparison
        assert comparison is not None
        assert comparison.runner.worker is not None
        for event in freezing.events[self.events :]:
            parts = (event, vars(event), event.step, event.reason)
            self.event_bytes += 8 + sum(map(sys.getsizeof, parts))
        self.events = len(freezing.events)
        self.found.append(
            {
                "memory, MB": resident(os.getpid()) - self.event_bytes / 2**20,
                "memory of the worker, MB": resident(comparison.runner.worker.pid),
                "open files": entries("/proc/self/fd"),
                "threads": entries("/proc/self/task"),
                "shared memory": entries("/dev/shm"),
                "on disk, MB": sum(path.stat().st_blocks for path in self.folder.rglob("*") if path.is_file()) / 2048,
                "events": self.events,
            }
        )


def entries(folder: str) -> int:
    """Of a folder."""
    return sum(1 for _ in Path(folder).iterdir())


def resident(pid: int) -> float:
    """Memory of a process that is its own, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        looks = Looks(Path(folder) / CACHE, options.minutes * 60)
        job = Job(Path(folder), background=True, policy=Cycles(), epochs=-1, callbacks=[looks], saves=False)
        result = job.run()
    quarter = len(looks.found) // 4
    print(f"{result['steps']} steps, {looks.found[-1]['events']} freezes and unfreezes in {options.minutes:g} minutes")
    print("| | second quarter | last quarter | |\n| --- | --- | --- | --- |")
    grown = []
    for name in looks.found[0]:
        if name == "events":
            continue
        early = max(look[name] for look in looks.found[quarter : 2 * quarter])
        late = max(look[name] for look in looks.found[-quarter:])
        if late > early + SLACK.get(name, 0):
            grown.append(name)
        print(f"| {name} | {early:.1f} | {late:.1f} | {'grows' if name in grown else 'flat'} |")
    sys.exit(f"{', '.join(grown)}: not flat" if grown or result["ended"] != "well" else 0)


if __name__ == "__main__":
    main()
