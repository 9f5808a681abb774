"""Numbers that say nothing: not finite, all the same, of one sample, of none."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from faults.held import check, fault
from faults.job import EPOCHS, EVERY, SAMPLES, STEPS, At, Job, Net, images
from faults.processes import run
from faults.trainer import ended_well
from lightning_egeria import FreezingPolicy
from lightning_egeria.core.training.freezer import Decision

BAD = (float("nan"), float("inf"), -float("inf"))


class Hasty(FreezingPolicy):
    """Freezes all it can at the first evaluation, after some steps, that has any number in it."""

    def __init__(self, after: int = 0) -> None:
        super().__init__(tolerance=1e9, patience=1, pretrained=True, trial=False, peer_tolerance=0)
        self.after = after

    def observe(
        self,
        step: int,
        plasticity: Sequence[float] | None,
        learning_rate: float,
        loss: float | None,
        layer_shares: Sequence[float] | None = None,
    ) -> Decision | None:
        return super().observe(step, plasticity if step > self.after else None, learning_rate, loss, layer_shares)


class LossFrom:
    """The loss is a number of no use from a step on."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value

    def __call__(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value if step >= self.step else loss


@fault("numbers", "the loss is NaN or infinite from some step on", "no crash; nothing freezes from then on")
def loss_not_finite(chance: random.Random, folder: Path) -> None:
    step = chance.randrange(1, 8)  # an answer comes when the next evaluation is due
    job = Job(folder, policy=Hasty(after=8 + EVERY), at_step=LossFrom(step, chance.choice(BAD)))
    result = ended_well(run(job))
    check(result["events"] == [], f"it froze at {result['events']}, after step {step}")
    check(result["steps"] == STEPS, "steps are missing")


class NotFinite(nn.Module):
    """Gives numbers of no use for some of the samples."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) == 0, self.value, x)


@fault("numbers", "activations of one sample are NaN or infinite", "no crash; nothing freezes")
def activations_not_finite(chance: random.Random, folder: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    net.get_submodule(chance.choice(("stem", "a"))).append(NotFinite(chance.choice(BAD)))
    result = ended_well(run(Job(folder, policy=Hasty(), net=net)))
    check(result["events"] == [], f"it froze at {result['events']}")


class Constant(nn.Module):
    """Forgets which sample it was given."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0 + self.value


@fault("numbers", "activations are the same for all samples", "no crash; nothing freezes, with the reason logged")
def activations_constant(chance: random.Random, folder: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    net.stem.append(Constant(chance.choice((0.0, 1.0, 1e-30))))
    result = ended_well(run(Job(folder, policy=Hasty(), net=net)))
    check(result["events"] == [], f"it froze at {result['events']}")
    told = [line for line in result["told"] if "the same for every sample" in line]
    check(len(told) == 1, f"told {result['told']}")


@fault("numbers", "batches of one sample", "no crash; nothing freezes, with a warning")
def batches_of_one(chance: random.Random, folder: Path) -> None:
    job = Job(folder, policy=Hasty(), batch_size=1, epochs=2)
    result = ended_well(run(job))
    check(result["events"] == [], f"it froze at {result['events']}")
    check(result["steps"] == 2 * SAMPLES, "steps are missing")
    told = [line for line in result["told"] if "plasticity needs at least 2 samples per batch, got 1" in line]
    check(len(told) == 1, f"told {result['told']}")


@fault("numbers", "a smaller last batch, down to one sample", "no crash; as without a cache")
def smaller_last_batch(chance: random.Random, folder: Path) -> None:
    size = chance.randint(6, 13)
    found = ended_well(run(Job(folder / "cached", batch_size=size)))
    expected = ended_well(run(Job(folder / "uncached", batch_size=size, cached=False)))
    check(found["parameters"] == expected["parameters"], "the cache changes the parameters")
    check(found["events"] == expected["events"], "the cache changes the freezes")
    check(found["steps"] == EPOCHS * -(-SAMPLES // size), "steps are missing")


@fault("numbers", "an empty data set", "what Lightning does without the callback: no step, no crash")
def empty_epoch(chance: random.Random, folder: Path) -> None:
    nothing = TensorDataset(*(tensor[:0] for tensor in images().tensors))
    job = Job(folder, dataset=nothing, cached=chance.random() < 0.5, callbacks=[At(print)])
    result = ended_well(run(job))
    check(result["steps"] == 0, "there were steps")
