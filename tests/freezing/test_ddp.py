"""Several processes under DDP: what is frozen is not exchanged, and all ranks do the same after the same step."""

import functools
import hashlib
import itertools
import os
import time
from datetime import timedelta

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from ranks import all_well, in_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.errors import DisagreementError, LayerChainError, UnsupportedError
from lightning_egeria.layers import StepListener

STEPS = 60


class Net(nn.Module):
    """Statistics in front, so that modes and buffers matter; nothing random, so that a plain loop can do the same."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 2 * 2, 3)

    def forward(self, images):
        return self.head(self.deep(self.middle(self.stem(images))).flatten(1))


LAYERS = ("stem", "middle", "deep")


def data(samples=64):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(3, (samples,), generator=generator))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def train_dataloader(self):
        return DataLoader(data(), batch_size=4, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-2)


def digest(module):
    state = hashlib.sha256()
    for parameter in module.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


class Watch(L.Callback):
    """Keeps, per optimizer step, a digest of all parameters and the bytes of gradients that were exchanged."""

    def __init__(self):
        self.digests, self.bytes = [], []
        self._sent = 0

    def on_train_start(self, trainer, pl_module):
        def hook(state, bucket):
            self._sent += bucket.buffer().nbytes
            return default_hooks.allreduce_hook(state, bucket)

        trainer.strategy.model.register_comm_hook(dist.group.WORLD, hook)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.digests.append(digest(pl_module))
        self.bytes.append(self._sent)
        self._sent = 0


def fit(module, *callbacks, ranks=2, nodes=1, steps=STEPS, strategy=None, ckpt_path=None, **arguments):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=strategy or DDPStrategy(timeout=timedelta(seconds=60)),
        max_steps=steps,
        callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        | arguments,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def scripted(schedule, **arguments):
    return KnowledgeGuidedFreezing(
        ScriptedPolicy(schedule), **{"evaluate_every_n_steps": 1, "check_ranks": True} | arguments
    )


def active_bytes(net, depth):
    parts = [part for name, part in net.named_children() if name not in LAYERS[:depth]]
    return sum(p.numel() * p.element_size() for part in parts for p in part.parameters())


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
    freezing.step_listeners.append(SeesBuffers())
    fit(module, freezing, steps=50)
    buffers = [buffer.tolist() for part in (module.net.stem, module.net.middle) for buffer in part.buffers()]
    return digest(module), buffers, freezing._engine.prefix.version, freezing.step_listeners[0].seen


class SeesBuffers(StepListener):
    """What a cache compares later with what it finds then."""

    def __init__(self):
        self.seen = []

    def step_begins(self):
        return True

    def prefix_changed(self, prefix):
        parts = (prefix.module.net.stem, prefix.module.net.middle)[: prefix.settled_depth]
        self.seen.append([buffer.tolist() for part in parts for buffer in part.buffers()])


def test_statistics_that_have_settled_are_those_of_all_ranks():
    first, second = all_well(in_ranks(2, run_slow))
    assert first == second
    assert first[2] == 5  # two freezes, each of which settles, and the end
    assert first[3][-2] == first[1]


def batches_by_hand():
    """This rank's share of the data, epoch after epoch, as the Trainer hands it out."""
    samples = data()
    sampler = DistributedSampler(samples, shuffle=True, seed=0)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def train_by_hand(net, optimizer, batches):
    """A plain loop over these batches."""
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()


def freeze_front(net):
    for part in (net.stem, net.middle):
        part.requires_grad_(False).eval()
        for parameter in part.parameters():
            parameter.grad = None


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


# --- what decides, and what happens when it fails


class Deciding(FreezingPolicy):
    """One that decides soon."""

    def __init__(self):
        super().__init__(patience=1, pretrained=True, peer_tolerance=0.9)


class Sleepy(L.Callback):
    """One rank is slow, now and then."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and batch_idx % 3 == 0:
            time.sleep(0.05)


def run_guided(extra, ranks=2, nodes=1, workers=1, steps=40, **arguments):
    module, watch = Module(), Watch()
    freezing = KnowledgeGuidedFreezing(
        Deciding(), evaluate_every_n_steps=2, check_ranks=True, workers=workers, **{"deterministic": True} | arguments
    )
    workers = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            workers.append(len(freezing._engine.pool.workers))

    fit(module, watch, freezing, Count(), *extra, ranks=ranks, nodes=nodes, steps=steps)
    return watch.digests, [vars(event) for event in freezing.events], max(workers)


@pytest.mark.parametrize(("nodes", "slow"), [(1, None), (1, 1), (2, 0)])
def test_one_rank_of_the_job_evaluates_and_all_follow(nodes, slow):
    extra = [Sleepy(slow)] if slow is not None else []
    first, second = all_well(in_ranks(2, functools.partial(run_guided, extra, nodes=nodes), nodes=nodes))
    assert first[:2] == second[:2]
    assert first[1], "nothing froze"
    assert (first[2], second[2]) == (1, 0)


class Murder(L.Callback):
    """Ends the process of the reference whenever it is seen."""

    def __init__(self, freezing):
        self.freezing = freezing

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for worker in self.freezing._engine.pool.workers:
            worker.kill("it was murdered")


def run_with_murder():
    module, watch = Module(), Watch()
    freezing = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2, deterministic=True)
    fit(module, watch, Murder(freezing), freezing, steps=40)
    return watch.digests, len(freezing.events), freezing.savings().evaluations_done


def test_a_worker_that_dies_neither_hangs_nor_splits_the_job():
    first, second = all_well(in_ranks(2, run_with_murder))
    assert first[0] == second[0]
    assert len(first[0]) == 40
    assert first[1] == second[1]


def run_lately():
    """Nothing waits for answers: which evaluation freezes is up to the machine, but not that all do the same."""
    module, watch = Module(), Watch()
    freezing = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, check_ranks=True)
    fit(module, watch, freezing, steps=60)
    return watch.digests, [vars(event) for event in freezing.events]


def test_late_answers_leave_the_ranks_equal():
    first, second = all_well(in_ranks(2, run_lately))
    assert first == second


class Still(FreezingPolicy):
    """Looks, at any learning rate, and never freezes."""

    wants_reference, held_back = True, None

    def observe(self, step, plasticity, learning_rate, loss):
        super().observe(step, plasticity, learning_rate, loss)


def run_still(with_callback):
    module, watch = Module(), Watch()
    still = KnowledgeGuidedFreezing(Still(tolerance=1e-12), evaluate_every_n_steps=2)
    fit(module, watch, *([still] if with_callback else []), steps=20)
    return watch.digests, watch.bytes


def test_nothing_frozen_is_nothing_changed():
    assert all_well(in_ranks(2, run_still, True)) == all_well(in_ranks(2, run_still, False))


def run_between(schedule, every):
    module, freezing = Module(), scripted(schedule, evaluate_every_n_steps=every)
    fit(module, freezing, steps=20)
    return digest(module), [(event.step, event.depth) for event in freezing.events]


def test_a_decision_between_two_evaluation_steps_waits_for_the_next():
    first, second = all_well(in_ranks(2, run_between, {3: 1, 9: 2, 11: 0, 12: 1}, 5))
    assert first == second
    assert first[1] == [(5, 1), (10, 2), (15, 1)]


# --- other code that has a say


class Perturb(L.Callback):
    """Changes a weight on one rank only."""

    def __init__(self, step, rank=1):
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            with torch.no_grad():
                pl_module.net.head.bias[0] += 1


def run_perturbed():
    fit(Module(), Perturb(5), scripted({3: 1, 6: 2}), steps=10)


def test_ranks_that_train_different_models_are_found():
    for result in in_ranks(2, run_perturbed):
        assert isinstance(result.error, DisagreementError)
        assert "the parameters of rank 1 are not those of rank 0" in str(result.error)


class Wake(L.Callback):
    """Lets a frozen parameter learn again, on every rank, as somebody else's callback would."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 7:
            pl_module.net.stem[0].weight.requires_grad_(True)


def run_awoken():
    module, watch, freezing = Module(), Watch(), scripted({3: 2, 12: 1}, evaluate_every_n_steps=5)
    fit(module, watch, freezing, Wake(), steps=20)
    return watch.digests, [(event.step, event.depth) for event in freezing.events]


def test_a_parameter_that_wakes_up_ends_freezing_on_all_ranks():
    first, second = all_well(in_ranks(2, run_awoken))
    assert first == second
    assert first[1] == [(5, 2), (10, 0)]
    assert len(set(first[0])) == 20


class Release(L.Callback):
    """Releases the stem after an epoch, as `BackboneFinetuning` does; DDP was made without it."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net.stem.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net.stem.requires_grad_(True)


def run_released():
    module, watch, freezing = Module(), Watch(), scripted({4: 1})
    fit(module, Release(), watch, freezing, steps=20)
    return watch.digests, watch.bytes, freezing.layer_modules


def test_layers_that_are_released_are_exchanged_from_then_on():
    first, second = all_well(in_ranks(2, run_released))
    assert first == second
    assert first[2] == ["net.stem.0", "net.middle.0", "net.deep.0"]
    assert (first[1][7], first[1][8]) == (active_bytes(Net(), 2), active_bytes(Net(), 0))


class Flat(Module):
    """Nothing here is a layer module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def run_flat():
    fit(Flat(), scripted({}), steps=2)


def test_a_model_without_layer_modules_is_refused_on_all_ranks():
    first, second = in_ranks(2, run_flat)
    assert isinstance(first.error, LayerChainError)
    assert isinstance(second.error, LayerChainError)
    assert str(second.error) == f"on rank 0: {first.error}"


# --- communication hooks, accumulation, compilation


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
    strategy = DDPStrategy(timeout=timedelta(seconds=60), **arguments)
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


def test_compiled_under_ddp():
    first, second = all_well(in_ranks(2, run_compiled, True))
    assert first[1:] == second[1:]
    net = Net()
    assert first[2] == [active_bytes(net, depth) for depth in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)]
    eager = all_well(in_ranks(2, run_compiled, False))[0]
    for mine, theirs in zip(first[0], eager[0], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs))


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def run_manual():
    module, watch = Manual(), Watch()
    fit(module, watch, scripted({3: 1, 6: 2, 9: 0}), steps=12)
    return watch.digests, watch.bytes


def test_manual_optimization():
    first, second = all_well(in_ranks(2, run_manual))
    assert first == second
    net = Net()
    assert first[1] == [active_bytes(net, depth) for depth in (0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0)]


class Uneven(Module):
    """The last batch of an epoch has one sample on each rank."""

    def train_dataloader(self):
        return DataLoader(data(34), batch_size=4, shuffle=True)


def run_uneven():
    module, watch = Uneven(), Watch()
    freezing = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, deterministic=True, workers=0)
    fit(module, watch, freezing, steps=25)
    return watch.digests, [vars(event) for event in freezing.events]


def test_a_smaller_last_batch():
    first, second = all_well(in_ranks(2, run_uneven))
    assert first == second
    assert first[1]


# --- from one number of ranks to another


def save(path, ranks, **kwargs):
    module = Module()
    freezing = scripted({3: 1, 6: 2})
    trainer = fit(module, freezing, ranks=ranks, steps=8, **kwargs)
    trainer.save_checkpoint(path)
    return digest(module), freezing.frozen_depth


def resume(path, ranks, **kwargs):
    module, watch, freezing = Module(), Watch(), scripted({3: 1, 6: 2, 12: 0})
    arguments = {"ckpt_path": path} | kwargs
    fit(module, *([watch] if ranks > 1 else []), freezing, ranks=ranks, steps=15, **arguments)
    return digest(module), watch.bytes, [(event.step, event.depth) for event in freezing.events]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2), (2, 1), (2, 4)])
def test_a_checkpoint_of_some_ranks_resumes_on_others(before, after, tmp_path):
    path = str(tmp_path / "run.ckpt")
    alone = {"strategy": "auto"}
    all_well(in_ranks(before, functools.partial(save, path, before, **(alone if before == 1 else {}))))
    results = all_well(in_ranks(after, functools.partial(resume, path, after, **(alone if after == 1 else {}))))
    assert all(result == results[0] for result in results)
    assert results[0][2] == [(3, 1), (6, 2), (12, 0)]
    net = Net()
    if after > 1:
        assert results[0][1] == [active_bytes(net, depth) for depth in (2, 2, 2, 2, 0, 0, 0)]


def run_deterministic(path, resumed):
    module = Module()
    policy = FreezingPolicy(pretrained=True, peer_tolerance=0.9)
    freezing = KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=3, deterministic=True, workers=0)
    saved = L.pytorch.callbacks.ModelCheckpoint(path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
    if resumed:
        fit(module, freezing, steps=30, ckpt_path=f"{path}/step={resumed}.ckpt")
    else:
        fit(module, freezing, saved, steps=30, enable_checkpointing=True)
    return digest(module), [vars(event) for event in freezing.events]


@pytest.mark.parametrize("step", [8, 16])
def test_a_resumed_deterministic_run_is_the_uninterrupted_one(step, tmp_path):
    whole = all_well(in_ranks(2, run_deterministic, str(tmp_path), None))
    resumed = all_well(in_ranks(2, run_deterministic, str(tmp_path), step))
    assert whole == resumed
    assert [event["step"] for event in whole[0][1]] == [9]


# --- what is refused


class Named(DDPStrategy):
    """Stands for a strategy of that name."""


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (type("FSDPStrategy", (Named,), {})(), r"FSDP1 flattens.*use strategy='ddp' or ModelParallelStrategy"),
        (type("DeepSpeedStrategy", (Named,), {})(), "divides the optimizer among the ranks"),
        (Named(), "freezing was not tried with Named"),
        (DDPStrategy(static_graph=True), "what is trained never changes"),
        (DDPStrategy(model_averaging_period=4), "post-local SGD"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_was_not_tried_is_refused_with_its_reason(strategy, reason):
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(UnsupportedError, match=reason):
        KnowledgeGuidedFreezing().setup(trainer, Module(), "fit")
    with pytest.warns(UserWarning, match="allow_untested=True: training goes on"):
        KnowledgeGuidedFreezing(allow_untested=True).setup(trainer, Module(), "fit")


def run_alone():
    module, watch, freezing = Module(), Watch(), scripted({3: 1, 6: 0})
    fit(module, watch, freezing, ranks=1, steps=8)
    return digest(module), [(event.step, event.depth) for event in freezing.events]


def test_ddp_with_one_process():
    (alone,) = all_well(in_ranks(1, run_alone))
    assert alone[1] == [(3, 1), (6, 0)]
