"""Several processes under FSDP2: each holds a part of every weight, and frozen layers exchange no gradients."""

import copy
import functools
import itertools
import os
from collections import Counter

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.core.snapshots.packing import pack, unpack
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.freezing import evaluation
from lightning_egeria.freezing.evaluation import StepCapture
from support.agreement import checked
from support.distributed.rank_jobs import Module, Net, batches_by_hand, fit, freeze_front, scripted, train_by_hand
from support.models import slow
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.cpu.Stream(), "record_event"), reason="this torch has no FSDP2 on the CPU"),
]


class Collectives(L.Callback):
    """How often each collective is called in a step, by its name, and the bytes of the tensors it fills.

    Without ``backward`` a step ends where its backward pass starts.
    """

    def __init__(self, backward=True):
        self.backward = backward
        self.counts, self.bytes = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._mode = _Counting()
        self._mode.__enter__()

    def on_before_backward(self, trainer, pl_module, loss):
        if not self.backward:
            self._end()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.backward:
            self._end()

    def _end(self):
        self._mode.__exit__(None, None, None)
        self.counts.append(self._mode.counts)
        self.bytes.append(self._mode.bytes)


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            name = operation.name()
            self.counts[name] += 1
            self.bytes[name] += sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
        return operation(*args, **(kwargs or {}))


class Sharded(Module):
    """Each layer a unit of its own; the head belongs to the root, which is not resharded after its forward."""

    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for part in (self.net.stem, self.net.middle, self.net.deep):
            fully_shard(part, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def whole(module):
    """Every rank's copy of all weights, gathered."""
    return [p.full_tensor().detach().numpy() for p in module.parameters()]


def strategy(ranks=2, **arguments):
    return ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, timeout=EXCHANGE_TIMEOUT, **arguments
    )


def sharded(module, *callbacks, ranks=2, **arguments):
    return fit(module, *callbacks, ranks=ranks, strategy=strategy(ranks), **arguments)


def run_scripted(schedule, steps):
    module, freezing, collectives = Sharded(), scripted(schedule), Collectives()
    sharded(module, freezing, collectives, steps=steps)
    return whole(module), freezing.layer_modules, [(e.step, e.depth) for e in freezing.events], collectives.counts


def test_frozen_layers_exchange_no_gradients():
    first, second = all_well(in_ranks(2, run_scripted, {3: 1, 6: 2, 9: 0}, 12))
    assert first[1:3] == second[1:3] == (["net.stem.0", "net.middle.0", "net.deep.0"], [(3, 1), (6, 2), (9, 0)])
    assert all((a == b).all() for a, b in zip(first[0], second[0], strict=True))
    exchanged = [counts["c10d::_reduce_scatter_base_"] for counts in first[3]]
    assert exchanged == [4, 4, 4, 3, 3, 3, 2, 2, 2, 4, 4, 4]
    # One word in each step, all of which are evaluation steps; the layer chain with the first; buffers with a freeze.
    assert [counts["c10d::broadcast_"] for counts in first[3]] == [3, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1]
    assert first[3] == second[3]


def freeze_by_hand(step, steps):
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    module, stream = Sharded(), batches_by_hand()
    module._device_mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
    module.configure_model()
    optimizer = module.configure_optimizers()
    train_by_hand(module.net, optimizer, itertools.islice(stream, step))
    freeze_front(module.net)
    for buffer in (*module.net.stem.buffers(), *module.net.middle.buffers()):  # FSDP2 leaves each rank its own
        dist.broadcast(buffer, 0)
    train_by_hand(module.net, optimizer, itertools.islice(stream, steps - step))
    return whole(module)


def freeze_by_callback(step, steps):
    module = Sharded()
    sharded(module, scripted({step: 2}), steps=steps)
    return whole(module)


def test_frozen_by_the_callback_is_frozen_by_hand():
    by_hand = all_well(in_ranks(2, freeze_by_hand, 10, 30))
    by_callback = all_well(in_ranks(2, freeze_by_callback, 10, 30))
    for first, second in zip(by_hand, by_callback, strict=True):
        assert all((a == b).all() for a, b in zip(first, second, strict=True))


# --- the reference of a model that no rank holds


class Snapshots(L.Callback):
    """Compares each new snapshot of the reference with the weights, gathered by a collective of its own."""

    def __init__(self, freezing):
        self.freezing = freezing
        self.same, self.plasticity = [], []
        self._evaluation = self._snapshot = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._weights = {name: p.full_tensor().clone() for name, p in pl_module.net.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        evaluation, snapshot = self.freezing.last_evaluation, self.freezing.comparison.runner.snapshot
        if evaluation is not None and evaluation is not self._evaluation:
            self.plasticity.append(evaluation.plasticity)
        self._evaluation = evaluation
        if snapshot is not None and snapshot is not self._snapshot:
            self._snapshot = snapshot
            reference = unpack(snapshot)["net"]
            assert not any(isinstance(part, FSDPModule) for part in reference.modules())
            weights = dict(reference.named_parameters())
            assert set(weights) == set(self._weights)
            self.same.append(all(torch.equal(self._weights[name], weights[name]) for name in weights))


def guided():
    policy = FreezingPolicy(pretrained=True, trial=False, peer_tolerance=0.9)
    return checked(KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, deterministic=True, background=False))


def run_guided():
    module, freezing = Sharded(), guided()
    snapshots, collectives = Snapshots(freezing), Collectives()
    sharded(module, snapshots, freezing, collectives, steps=20)
    events = [vars(event) for event in freezing.events]
    return whole(module), events, snapshots.same, snapshots.plasticity, collectives.counts


class Whole(Sharded):
    configure_model = L.LightningModule.configure_model


class Halved(Sharded):
    """Gathers its weights in half the bytes."""

    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return
        for part in (self.net.stem, self.net.middle, self.net.deep):
            part[1] = nn.GroupNorm(2, part[1].num_features)  # running statistics stay in float32
        mesh, precision = self.device_mesh["data_parallel"], MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (self.net.stem, self.net.middle, self.net.deep):
            fully_shard(part, mesh=mesh, mp_policy=precision)
        fully_shard(self.net, mesh=mesh, mp_policy=precision)


def run_halved():
    module, freezing = Halved(), guided()
    sharded(module, freezing, steps=20)
    return whole(module), [vars(event) for event in freezing.events], freezing.savings().evaluations_done


def test_mixed_precision_of_fsdp():
    first, second = all_well(in_ranks(2, run_halved))
    assert first[1] == second[1]
    assert first[1], "nothing froze"
    assert first[2] > 0
    assert all((a == b).all() for a, b in zip(first[0], second[0], strict=True))


class OfTheForward(StepCapture):
    """Compares the weights of the observed forward, as FSDP2 shows them, and not those of after the step."""

    def stop(self):
        super().stop()
        if not hasattr(self, "copied"):
            self.copied = self._network = copy.deepcopy(self._network)


def run_guided_under_ddp():
    evaluation.StepCapture = OfTheForward
    module, freezing = Whole(), guided()
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            evaluation = freezing.last_evaluation
            if evaluation is not None and evaluation.step == trainer.global_step:
                seen.append(evaluation.plasticity)

    fit(module, freezing, Look(), steps=20)
    return [vars(event) for event in freezing.events], seen


def test_the_reference_is_taken_from_the_weights_that_pass_by():
    first, second = all_well(in_ranks(2, run_guided))
    assert first[1] == second[1]
    assert first[1], "nothing froze"
    assert all((a == b).all() for a, b in zip(first[0], second[0], strict=True))
    assert (first[2], second[2]) == ([True, True], [])
    # No collective but the word of the first rank.
    gathered = [counts["c10d::_allgather_base_"] for counts in first[4]]
    assert gathered[:6] == [7] * 6
    events, plasticity = all_well(in_ranks(2, run_guided_under_ddp))[0]
    assert [event["step"] for event in events] == [event["step"] for event in first[1]]
    torch.testing.assert_close(torch.tensor(first[3]), torch.tensor(plasticity), rtol=1e-3, atol=1e-8)


def test_a_module_is_sent_without_what_fsdp_has_put_on_it():
    all_well(in_ranks(2, send_without_fsdp))


def send_without_fsdp():
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    calls = []
    net = Net()
    net.register_forward_hook(functools.partial(_note, calls))
    module = fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    parcel = pack(module, for_process=False)
    parcel.tensors = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in parcel.tensors]
    sent = unpack(parcel)
    assert type(sent) is Net
    assert len(sent._forward_hooks) == 1
    assert not sent._forward_pre_hooks
    sent.eval()
    module.eval()
    torch.testing.assert_close(sent(torch.ones(2, 1, 8, 8)), module(torch.ones(2, 1, 8, 8)))


def _note(calls, module, args, output):
    calls.append(1)


# --- checkpoints


def save(folder, kind, ranks):
    module, freezing = Sharded(), scripted({3: 1, 6: 2, 12: 0})
    saved = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    own = strategy(ranks, save_distributed_checkpoint=kind == "sharded")
    fit(module, freezing, saved, ranks=ranks, strategy=own, steps=20, enable_checkpointing=True)
    return whole(module)


def resume(folder, kind, ranks):
    module, freezing = Sharded(), scripted({3: 1, 6: 2, 12: 0})
    own = strategy(ranks, save_distributed_checkpoint=kind == "sharded")
    moments = []

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            state = trainer.optimizers[0].state
            moments.extend(
                float(state[p]["exp_avg"].full_tensor().abs().sum()) for p in pl_module.net.stem.parameters()
            )

    saved = L.pytorch.callbacks.ModelCheckpoint(folder + "/more", filename="{step}", every_n_train_steps=50)
    fit(
        module,
        freezing,
        saved,
        Look(),
        ranks=ranks,
        strategy=own,
        steps=20,
        ckpt_path=f"{folder}/step=8.ckpt",
        enable_checkpointing=True,
    )
    return whole(module), [(event.step, event.depth) for event in freezing.events], moments


@pytest.mark.parametrize("kind", ["sharded", slow("full")])
def test_a_resumed_run_is_the_uninterrupted_one(kind, tmp_path):
    uninterrupted = all_well(in_ranks(2, save, str(tmp_path), kind, 2))[0]
    weights, events, moments = all_well(in_ranks(2, resume, str(tmp_path), kind, 2))[0]
    assert events == [(3, 1), (6, 2), (12, 0)]
    assert all(moment > 0 for moment in moments)  # the stem was frozen when its moments were saved
    assert all((a == b).all() for a, b in zip(weights, uninterrupted, strict=True))


@pytest.mark.parametrize("kind", [slow("sharded"), slow("full")])
def test_a_checkpoint_of_two_ranks_resumes_on_four(kind, tmp_path):
    all_well(in_ranks(2, save, str(tmp_path), kind, 2))
    results = all_well(in_ranks(4, resume, str(tmp_path), kind, 4))
    for weights, events, moments in results:
        assert events == [(3, 1), (6, 2), (12, 0)]
        assert all(moment > 0 for moment in moments)
        assert all((a == b).all() for a, b in zip(weights, results[0][0], strict=True))


def test_tensor_parallelism_is_refused():
    for failure in in_ranks(2, run_tensor_parallel):
        assert isinstance(failure.error, UnsupportedError)
        assert "tensor_parallel_size=1" in str(failure.error)


def run_tensor_parallel():
    divided = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, timeout=EXCHANGE_TIMEOUT)
    fit(Sharded(), KnowledgeGuidedFreezing(ScriptedPolicy({})), strategy=divided, steps=2)
