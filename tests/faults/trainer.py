"""The trainer dies, at any line of the package or at any moment, and starts again."""

import random
import signal
from pathlib import Path
from typing import Any

import torch

from faults.held import baseline, check, fault, lines
from faults.job import EPOCHS, STEPS, Job
from faults.processes import AtLine, Ended, SignalSelf, after_a_while, run

MOST_STARTS = 40


class InjectedError(Exception):
    """Raised by a job's own training step."""


class RaisesAt:
    """Raises at one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        if step == self.step:
            raise InjectedError(f"at step {step}")
        return loss


def clean(ended: Ended) -> None:
    """Nothing is left of a job, however it ended."""
    check(ended.exit_status is not None, "it hangs")
    check(ended.left == [], f"it left {ended.left}")
    check(ended.result is None or ended.result["threads"] == [], "it left a thread")


def ended_well(ended: Ended) -> dict[str, Any]:
    """The job came to its end and left nothing; returns what it kept."""
    clean(ended)
    result = ended.result or {}
    check(result.get("ended") == "well", f"it did not come to its end: {ended.log[-2000:]}")
    return result


def same_as_uninterrupted(ended: Ended) -> dict[str, Any]:
    """The job, started again, came to its end as if nothing had been; returns what it kept."""
    result = ended_well(ended)
    check(result["steps"] == STEPS, f"{result['steps']} steps instead of {STEPS}")
    check(result["parameters"] == baseline()["parameters"], "other parameters than those of an uninterrupted run")
    check(result["events"] == baseline()["events"], "other freezes than those of an uninterrupted run")
    return result


def _told_to_end(number: signal.Signals, chance: random.Random, folder: Path) -> None:
    background = chance.random() < 0.25  # the others have the reference in the thread of the trainer
    job = Job(folder, background=background)
    ended = run(job, AtLine(chance.randrange(lines(background) * 9 // 10), SignalSelf(number)).begin)
    clean(ended)
    check(ended.result is not None, f"it did not end in order: {ended.log[-2000:]}")
    same_as_uninterrupted(run(job))


@fault("trainer", "SIGINT at any line", "nothing left; started again, it ends as if uninterrupted")
def interrupted(chance: random.Random, folder: Path) -> None:
    _told_to_end(signal.SIGINT, chance, folder)


@fault("trainer", "SIGTERM at any line", "nothing left; started again, it ends as if uninterrupted")
def terminated(chance: random.Random, folder: Path) -> None:
    _told_to_end(signal.SIGTERM, chance, folder)


@fault(
    "trainer", "exception in `training_step` at any step", "nothing left; started again, it ends as if uninterrupted"
)
def raised(chance: random.Random, folder: Path) -> None:
    background = chance.random() < 0.25
    ended = run(Job(folder, background=background, at_step=RaisesAt(chance.randrange(STEPS))))
    clean(ended)
    check(ended.result is not None and ended.result["ended"].startswith("InjectedError: at step"), "not the user's own")
    same_as_uninterrupted(run(Job(folder, background=background)))


@fault("trainer", "SIGKILL at any line, with a worker", "nothing left; started again, it ends as if uninterrupted")
def killed_with_worker(chance: random.Random, folder: Path) -> None:
    job = Job(folder, background=True)
    ended = run(job, AtLine(chance.randrange(lines(True) * 9 // 10), SignalSelf(signal.SIGKILL)).begin)
    clean(ended)
    check(ended.exit_status == -signal.SIGKILL, f"it was to be killed, and ended with {ended.exit_status}")
    same_as_uninterrupted(run(job))


@fault(
    "trainer, cache",
    "SIGKILL again and again, at any line and any moment, until a start comes to its end",
    "nothing left; the last start ends as if uninterrupted: what is torn is a miss",
)
def torn(chance: random.Random, folder: Path) -> int:
    job, kills = Job(folder), 0
    for _ in range(MOST_STARTS):
        if kills >= 5 and chance.random() < 0.2:
            break
        if chance.random() < 0.5:
            # A start after a checkpoint has fewer lines left: some come to their end.
            ended = run(job, AtLine(chance.randrange(lines() // EPOCHS * 2), SignalSelf(signal.SIGKILL)).begin)
        else:
            ended = run(job, meanwhile=after_a_while(chance, 0.5, signal.SIGKILL))
        clean(ended)
        if ended.exit_status == 0:
            break
        kills += 1
    same_as_uninterrupted(run(job) if ended.exit_status else ended)
    return kills
