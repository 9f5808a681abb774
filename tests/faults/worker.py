"""The process of the reference model dies, stops, or gives wrong answers, late ones, or none."""

import contextlib
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from faults.held import baseline, check, fault, once
from faults.job import EVERY, STEPS, At, Job, Net
from faults.processes import LIMIT_S, Ended, run
from faults.trainer import ended_well, same_as_uninterrupted
from lightning_egeria import KnowledgeGuidedFreezing

FAILED = "reference model"
WAIT_S = 45.0  # for an answer; a worker takes some seconds to start, on a busy machine many
ANSWERS = (STEPS - EVERY) // EVERY - 3  # in a run without a fault, at least
MOST_LOST = 4
NO_MORE = "no more layer modules will freeze"


class ToWorker:
    """Does something to the process of the reference, once that has answered."""

    def __call__(self, freezing: KnowledgeGuidedFreezing) -> None:
        worker = freezing.comparison.runner.worker if freezing.comparison is not None else None
        assert worker is not None
        deadline = time.monotonic() + LIMIT_S
        while not worker.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        self.do(worker.pid)

    def do(self, pid: int) -> None:
        raise NotImplementedError


class Signals(ToWorker):
    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def do(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.number)


class TakesMemory(ToWorker):
    """Leaves it a megabyte more than it has."""

    def do(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + 2**20
            resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


class Trap(nn.Module):
    """A layer that raises, or sleeps, in every process but the one that trains."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.owner, self.seconds = 0, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.owner != os.getpid():
            if self.seconds is None:
                raise RuntimeError("not in this process")
            time.sleep(self.seconds)
        return x


class Owns(L.Callback):
    """Tells every trap which process trains."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, Trap):
                module.owner = os.getpid()


def trapped(seconds: float | None) -> Net:
    """A network with a trap in its first layer module."""
    torch.manual_seed(0)
    net = Net()
    net.stem.append(Trap(seconds))
    return net


def trained_to_the_end(ended: Ended) -> dict[str, Any]:
    """Training went on."""
    result = ended_well(ended)
    check(result["steps"] == STEPS, f"{result['steps']} steps instead of {STEPS}")
    check(result["finite"], "a parameter is not finite")
    return result


def _struck(act: ToWorker, chance: random.Random, folder: Path) -> None:
    # Every other run waits for its answers; the others go on without, and end long before the time of an answer.
    waits = chance.random() < 0.5
    step = chance.randrange(3, 30)
    job = Job(
        folder, background=True, deterministic=waits, timeout_s=WAIT_S if waits else 600.0, callbacks=[At(act, step)]
    )
    result = trained_to_the_end(run(job))
    if waits:
        once(result["told"], FAILED)
        check(result["answers"] >= ANSWERS - MOST_LOST, f"{result['answers']} answers of {ANSWERS}: it did not go on")


@fault("reference worker", "SIGKILL", "training goes on; one warning; a new worker, and freezing goes on")
def worker_killed(chance: random.Random, folder: Path) -> None:
    _struck(Signals(signal.SIGKILL), chance, folder)


@fault("reference worker", "SIGSTOP", "training goes on; where it waits, one warning and a new worker after its time")
def worker_stopped(chance: random.Random, folder: Path) -> None:
    _struck(Signals(signal.SIGSTOP), chance, folder)


@fault(
    "reference worker", "no more memory", "training goes on; at most one warning of each kind; freezing goes on or ends"
)
def worker_out_of_memory(chance: random.Random, folder: Path) -> None:
    step = chance.randrange(3, 30)
    job = Job(folder, background=True, timeout_s=WAIT_S, callbacks=[At(TakesMemory(), step)])
    result = trained_to_the_end(run(job))
    told = [line for line in result["told"] if FAILED in line]
    check(len(told) <= 2 and len(set(told)) == len(told), f"told {told}")


@fault("reference worker", "exception in the user's module there", "one warning and one of the end; nothing freezes")
def module_raises(chance: random.Random, folder: Path) -> None:
    job = Job(folder, background=True, deterministic=chance.random() < 0.5, net=trapped(None), callbacks=[Owns()])
    result = trained_to_the_end(run(job))
    check(result["events"] == [], f"it froze without answers: {result['events']}")
    told = [line for line in result["told"] if FAILED in line]
    check(len(told) <= 2, f"told {told}")
    check(
        job.deterministic is False or sum(NO_MORE in line for line in told) == 1, f"the end of it is not told: {told}"
    )


@fault("reference worker", "it hangs", "training does not wait, or for a bounded time; nothing freezes")
def module_hangs(chance: random.Random, folder: Path) -> None:
    waits = chance.random() < 0.5
    job = Job(folder, background=True, deterministic=waits, timeout_s=1.0 if waits else 600.0, net=trapped(3600.0))
    job.callbacks = [Owns()]
    result = trained_to_the_end(run(job))
    check(result["events"] == [], f"it froze without answers: {result['events']}")
    if waits:
        check(any(NO_MORE in line for line in result["told"]), f"the end of it is not told: {result['told']}")


@fault("reference worker", "100 times slower", "where training waits, it ends as if nothing had been; else it goes on")
def module_slow(chance: random.Random, folder: Path) -> None:
    waits = chance.random() < 0.5
    job = Job(folder, background=True, deterministic=waits, net=trapped(0.05), callbacks=[Owns()])
    ended = run(job)
    if waits:
        same_as_uninterrupted(ended)
    else:
        result = trained_to_the_end(ended)
        check(len(result["events"]) <= len(baseline()["events"]), f"more freezes than answers: {result['events']}")
