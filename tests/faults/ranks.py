"""One process of a job of several dies, or stops, and the others do what they would do without the callback."""

import contextlib
import os
import random
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import lightning as L

from faults.held import check, fault
from faults.job import STEPS, Job
from faults.processes import Ended, finish, start
from faults.trainer import ended_well
from support.ranks import LOCAL, free_port

RANKS = 2
EXCHANGE_S = 8.0  # that a rank waits for another before it gives up


class Joins:
    """Makes the process one rank of a job."""

    def __init__(self, rank: int, port: str) -> None:
        self.rank, self.port = rank, port

    def __call__(self) -> None:
        os.environ.update(LOCAL, MASTER_ADDR="127.0.0.1", MASTER_PORT=self.port)
        os.environ.update(NODE_RANK="0", LOCAL_RANK=str(self.rank))


class Strikes(L.Callback):
    """Sends a signal to its own process after a step, on one rank."""

    def __init__(self, rank: int, step: int, number: signal.Signals) -> None:
        self.rank, self.step, self.number = rank, step, number

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), self.number)


def _train(folder: Path, freezing: bool, strikes: Strikes | None) -> list[Ended]:
    """All ranks, to their end."""
    port = free_port()
    jobs = [
        Job(
            folder / str(rank),
            cache_dir=folder / "cache",
            checkpoint=folder / "last.ckpt",
            cached=freezing,
            freezing=freezing,
            ranks=RANKS,
            exchange_s=EXCHANGE_S,
            callbacks=[strikes] if strikes is not None else [],
        )
        for rank in range(RANKS)
    ]
    processes = [start(job, Joins(rank, port)) for rank, job in enumerate(jobs)]
    # The one that is struck comes last: if it is stopped, it is ended when the others have ended.
    order = sorted(range(RANKS), key=lambda rank: strikes is not None and strikes.rank == rank)
    ended = {rank: finish(processes[rank], jobs[rank], _end_if_stopped) for rank in order}
    return [ended[rank] for rank in range(RANKS)]


def _end_if_stopped(process: BaseProcess) -> None:
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            process.kill()


def _struck(number: signal.Signals, chance: random.Random, folder: Path) -> None:
    strikes = Strikes(chance.randrange(RANKS), chance.randrange(1, STEPS // RANKS), number)
    with_callback = _train(folder / "freezing", True, strikes)
    other = with_callback[1 - strikes.rank]
    check(other.exit_status is not None, f"the other rank hangs: {other.log[-2000:]}")
    for ended in with_callback:
        check(ended.left == [], f"it left {ended.left}")
    if chance.random() < 0.3:
        without = _train(folder / "plain", False, strikes)[1 - strikes.rank]
        check(
            (without.exit_status, without.result is None) == (other.exit_status, other.result is None),
            f"the other rank ends with {other.exit_status}, and without the callback with {without.exit_status}",
        )
    again = _train(folder / "freezing", True, None)
    whole = _train(folder / "whole", True, None)
    for rank in range(RANKS):
        found, expected = ended_well(again[rank]), ended_well(whole[rank])
        check(found["parameters"] == expected["parameters"], "other parameters than those of an uninterrupted run")
        check(found["events"] == expected["events"], "other freezes than those of an uninterrupted run")


@fault("one of two ranks", "SIGKILL", "the other ends as without the callback; started again, as if uninterrupted")
def rank_killed(chance: random.Random, folder: Path) -> None:
    _struck(signal.SIGKILL, chance, folder)


@fault("one of two ranks", "SIGSTOP", "the other waits its time, then ends; started again, as if uninterrupted")
def rank_stopped(chance: random.Random, folder: Path) -> None:
    _struck(signal.SIGSTOP, chance, folder)
