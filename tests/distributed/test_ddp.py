"""Several processes under DDP: what is frozen is not exchanged."""

import itertools
import os

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria import KnowledgeGuidedFreezing
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.errors import UnsupportedError
from support.distributed.rank_jobs import (
    STEPS,
    Module,
    Net,
    Watch,
    active_bytes,
    batches_by_hand,
    digest,
    fit,
    freeze_front,
    scripted,
    train_by_hand,
)
from support.models import ManualSteps
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks


def run_scripted(schedule, ranks, steps):
    module, watch, freezing = Module(), Watch(), scripted(schedule)
    fit(module, watch, freezing, ranks=ranks, steps=steps)
    return watch.digests, watch.bytes, [(event.step, event.depth) for event in freezing.events]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_stay_equal_and_exchange_the_active_share(ranks):
    schedule = {3: 1, 6: 2, 9: 0, 12: 2, 15: 1}
    digests, sent, events = zip(*all_well(in_ranks(ranks, run_scripted, schedule, ranks, 18)), strict=True)
    assert len(digests[0]) == 18
    assert all(other == digests[0] for other in digests)
    assert all(other == sorted(schedule.items()) for other in events)
    net = Net()
    depths = [max((s for s in schedule if s < step), default=None) for step in range(1, 19)]
    assert list(sent[0]) == [active_bytes(net, schedule.get(step, 0)) for step in depths]
    assert all(other == sent[0] for other in sent)


def run_slow():
    module = Module()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.01
    freezing = scripted({3: 1, 6: 2})
    sees = SeesBuffers(freezing)
    freezing.observers.add(sees)
    fit(module, freezing, steps=50)
    buffers = [buffer.tolist() for part in (module.net.stem, module.net.middle) for buffer in part.buffers()]
    return digest(module), buffers, freezing.freezer.prefix.version, sees.seen


class SeesBuffers(Observer):
    """What a cache compares later with what it finds then: once for each version of the prefix."""

    def __init__(self, freezing):
        self.freezing = freezing
        self.seen, self._version = [], 0

    def optimizer_step(self, step):
        prefix = self.freezing.freezer.prefix
        if prefix.version != self._version:
            self._version = prefix.version
            parts = (prefix.module.net.stem, prefix.module.net.middle)[: prefix.settled_depth]
            self.seen.append([buffer.tolist() for part in parts for buffer in part.buffers()])


def test_statistics_that_have_settled_are_those_of_all_ranks():
    first, second = all_well(in_ranks(2, run_slow))
    assert first == second
    assert first[2] == 5  # two freezes, each of which settles, and the end
    assert len(first[3]) == 4
    assert first[3][-1] == first[1]


def freeze_by_hand(step, steps):
    """Freezes the first two parts and wraps the network anew."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    module, stream = Module(), batches_by_hand()
    wrapped, optimizer = DistributedDataParallel(module.net), module.configure_optimizers()
    train_by_hand(wrapped, optimizer, itertools.islice(stream, step))
    freeze_front(module.net)
    del wrapped
    wrapped = DistributedDataParallel(module.net)
    train_by_hand(wrapped, optimizer, itertools.islice(stream, steps - step))
    return [parameter.detach().numpy() for parameter in module.parameters()]


def freeze_by_callback(step, steps):
    module = Module()
    fit(module, scripted({step: 2}), steps=steps)
    return [parameter.detach().numpy() for parameter in module.parameters()]


def test_frozen_by_the_callback_is_frozen_by_hand():
    by_hand = all_well(in_ranks(2, freeze_by_hand, 10, STEPS))
    by_callback = all_well(in_ranks(2, freeze_by_callback, 10, STEPS))
    for first, second in zip(by_hand, by_callback, strict=True):
        assert all((a == b).all() for a, b in zip(first, second, strict=True))


class Hooked(L.Callback):
    """Registers a hook as a user does."""

    def __init__(self, state, hook):
        self.state, self.hook = state, hook

    def on_train_start(self, trainer, pl_module):
        if self.hook is None:
            trainer.strategy.model._register_builtin_comm_hook(self.state)
        else:
            trainer.strategy.model.register_comm_hook(self.state, self.hook)


def run_hooked(kind):
    if kind == "PowerSGD":
        state = powerSGD.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        hook = powerSGD.powerSGD_hook
    elif kind == "builtin":
        state, hook = dist.BuiltinCommHookType.FP16_COMPRESS, None
    else:
        state, hook = dist.group.WORLD, default_hooks.fp16_compress_hook
    names = []

    class Names(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            names.append(trainer.strategy.model._get_ddp_logging_data().get("comm_hook"))

    module = Module()
    fit(module, Hooked(state, hook), Names(), scripted({3: 1, 6: 2, 9: 0, 12: 1}), steps=15)
    return digest(module), names


@pytest.mark.filterwarnings("ignore:.*PowerSGD")
@pytest.mark.parametrize("kind", ["fp16", "builtin", "PowerSGD"])
def test_communication_hooks_are_kept(kind):
    first, second = all_well(in_ranks(2, run_hooked, kind))
    assert first == second
    assert len(set(first[1])) == 1
    assert first[1][0]


def run_accumulated(kwargs):
    module, watch = Module(), Watch()
    fit(module, watch, scripted({2: 1, 4: 2, 6: 0}), steps=8, accumulate_grad_batches=3, **kwargs)
    return digest(module), watch.bytes


def test_gradient_accumulation_exchanges_once_in_a_window():
    first, second = all_well(in_ranks(2, run_accumulated, {}))
    assert first == second
    net, by_step = Net(), [sum(first[1][i : i + 3]) for i in (0, 3)]
    assert by_step[0] == active_bytes(net, 0)
    assert sum(count > 0 for count in first[1]) == 8  # an epoch of eight batches ends with a window of two
    assert [count for count in first[1] if count] == [active_bytes(net, depth) for depth in (0, 0, 1, 1, 2, 2, 0, 0)]


def run_with_arguments(arguments, kwargs):
    module, watch = Module(), Watch()
    strategy = DDPStrategy(timeout=EXCHANGE_TIMEOUT, **arguments)
    fit(module, watch, scripted({3: 1, 6: 2, 9: 0}), steps=12, strategy=strategy, **kwargs)
    return watch.digests, watch.bytes


@pytest.mark.parametrize(
    ("arguments", "kwargs"),
    [
        ({"gradient_as_bucket_view": True}, {}),
        ({"find_unused_parameters": True}, {}),
        ({"broadcast_buffers": False}, {}),
        ({"bucket_cap_mb": 0.001}, {"gradient_clip_val": 0.1}),
        ({}, {"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_arguments_of_ddp(arguments, kwargs):
    first, second = all_well(in_ranks(2, run_with_arguments, arguments, kwargs))
    assert first == second
    net = Net()
    assert first[1] == [active_bytes(net, depth) for depth in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)]


def run_compiled(compiled):
    module, watch = Module(), Watch()
    trained = torch.compile(module, backend="aot_eager") if compiled else module
    fit(trained, watch, scripted({3: 1, 6: 2, 9: 0}), steps=12)
    return [p.detach().numpy() for p in module.parameters()], watch.digests, watch.bytes


@pytest.mark.slow
def test_compiled_under_ddp():
    first, second = all_well(in_ranks(2, run_compiled, True))
    assert first[1:] == second[1:]
    net = Net()
    assert first[2] == [active_bytes(net, depth) for depth in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)]
    eager = all_well(in_ranks(2, run_compiled, False))[0]
    for mine, theirs in zip(first[0], eager[0], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs))


class Manual(ManualSteps, Module):
    pass


def run_manual():
    module, watch = Manual(), Watch()
    fit(module, watch, scripted({3: 1, 6: 2, 9: 0}), steps=12)
    return watch.digests, watch.bytes


def test_manual_optimization():
    first, second = all_well(in_ranks(2, run_manual))
    assert first == second
    net = Net()
    assert first[1] == [active_bytes(net, depth) for depth in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)]


class FSDPStrategy(DDPStrategy):
    """Of the name of one that is refused; `tests/training/test_support.py` has all."""


def test_what_was_not_tried_is_refused_with_its_reason():
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=FSDPStrategy(), logger=False, enable_checkpointing=False)
    with pytest.raises(UnsupportedError, match=r"FSDP1 flattens.*Use strategy='ddp' or ModelParallelStrategy"):
        KnowledgeGuidedFreezing().setup(trainer, Module(), "fit")
    with pytest.warns(UserWarning, match="allow_untested=True"):
        KnowledgeGuidedFreezing(allow_untested=True).setup(trainer, Module(), "fit")


def run_alone():
    module, watch, freezing = Module(), Watch(), scripted({3: 1, 6: 0})
    fit(module, watch, freezing, ranks=1, steps=8)
    return digest(module), [(event.step, event.depth) for event in freezing.events]


def test_ddp_with_one_process():
    (alone,) = all_well(in_ranks(1, run_alone))
    assert alone[1] == [(3, 1), (6, 0)]
