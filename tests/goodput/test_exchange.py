"""Two processes: gradients seen before they are averaged, ranks that agree, and other numbers of processes."""

import itertools

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.goodput.gradients import measure_exchange
from lightning_egeria.methods.goodput.profile import Profile
from support.goodput import SavesAfter, Seeing, adaptive, numbered, trained
from support.models import After, equal
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks


def ddp(**arguments):
    return {"devices": 2, "strategy": DDPStrategy(timeout=EXCHANGE_TIMEOUT, **arguments)}


def parameters(module):
    return digest(dict(module.named_parameters()))


def as_without_it():
    """Weights of an idle run are those of a plain one, bit for bit."""
    plain, _ = trained(numbered(), epochs=1, **ddp())
    data = adaptive(largest=16)
    idle, _ = trained(data, epochs=1, **ddp())
    assert equal(idle, plain)
    assert idle.seen == plain.seen
    assert data.control.noise.estimates >= 4
    assert not data.control.noise.biased


def agreeing(rank):
    """Each rank measures other times; rank 0's decide."""
    add = Profile.add
    own = [1.0, 5.0][rank]
    Profile.add = lambda self, where, seconds, *others: add(self, where, own, *others)
    freezing = KnowledgeGuidedFreezing(
        ScriptedPolicy({9: 1}), evaluate_every_n_steps=1, background=False, deterministic=True
    )
    weights, data = [], adaptive(numbered(320), change_every_n_steps=5, local_batch_sizes=(4, 24))
    look = After(lambda trainer, module: weights.append(parameters(module)))
    try:
        module, _ = trained(data, freezing, look, epochs=2, **ddp())
    finally:
        Profile.add = add
    changes = [(change.step, change.batch_size, change.batches) for change in data.changes]
    return weights, changes, data.control.noise.state(), data.control.progress, list(map(len, module.seen))


class Linear(Seeing):
    """The mean of two halves' losses is the loss of the whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))


def refuses_another_hook():
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UnsupportedError, match="Remove ddp_comm_hook"):
        measure_exchange(module, None)


def resumed_on_two(folder):
    """Go on from the checkpoint of one process, and write another in the middle of the next epoch."""
    data, saves = adaptive(largest=8), SavesAfter(folder / "two", 9)
    module, _ = trained(data, saves, module=Linear(), epochs=3, ckpt_path=folder / "one", **ddp())
    return module.seen, module.losses, data.control.progress.iterations, data.control.initial


def on_a_rank(folder):
    as_without_it()
    found = agreeing(torch.distributed.get_rank())
    refuses_another_hook()
    return found, resumed_on_two(folder)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.slow
def test_two_processes(tmp_path):
    whole, _ = trained(adaptive(largest=8), SavesAfter(tmp_path / "one", 6), module=Linear(), epochs=3)
    first, second = all_well(in_ranks(2, on_a_rank, tmp_path))
    assert first[0] == second[0]
    weights, changes, noise, _, _ = first[0]
    assert changes[0][0] == 5
    assert noise["estimates"] > 0
    assert len(set(weights)) == len(weights)
    # One process had 6 batches of 8; two have the rest of the epoch in batches of 4.
    (seen, losses, iterations, initial), (others, other_losses, _, _) = first[1], second[1]
    assert (initial, iterations) == (8, 30.0)
    assert set(map(len, seen)) == {4}
    assert len(seen) == 4 + 10 + 10
    assert [sorted(a + b) for a, b in zip(seen[:4], others[:4], strict=True)] == whole.seen[6:10]
    means = [(a + b) / 2 for a, b in zip(losses[:4], other_losses[:4], strict=True)]
    assert means == pytest.approx(whole.losses[6:10], rel=1e-5)
    # Then one process has the rest of their second epoch, and the third.
    data = adaptive(largest=8)
    resumed, _ = trained(data, module=Linear(), epochs=3, ckpt_path=tmp_path / "two")
    assert data.control.progress.iterations == 30.0
    assert list(map(len, resumed.seen)) == [8] * 15
    assert sorted(flat(seen[4:9] + others[4:9] + resumed.seen[:5])) == list(range(80))
    assert resumed.seen[0] == [one for pair in zip(seen[9], others[9], strict=True) for one in pair]
    assert resumed.losses[0] == pytest.approx((losses[9] + other_losses[9]) / 2, rel=1e-5)
    assert sorted(flat(resumed.seen[5:])) == list(range(80))


class Narrow(Seeing):
    """The last rank has less memory."""

    def training_step(self, batch, batch_idx):
        if len(batch[2]) > 8 and self.global_rank:
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch, batch_idx)


def with_less_memory():
    data = adaptive(batch_sizes={2: 64})
    module, _ = trained(data, module=Narrow(), epochs=2, **ddp())
    return module.sizes, data.control.out_of_memory, parameters(module)


@pytest.mark.slow
def test_a_rank_without_memory_holds_up_no_other():
    first, second = all_well(in_ranks(2, with_less_memory, timeout_s=120))
    assert first == second
    assert first[0][-1] == 8
    assert first[1] <= 32


def test_without_ddp_there_is_nothing_to_see():
    measure_exchange(torch.nn.Linear(2, 2), None)
