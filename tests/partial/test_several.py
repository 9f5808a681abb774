"""Several processes under DDP: both exchanges give one training, and all ranks stay equal."""

import itertools
import os

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria import LogUniform, StructuredPartialBackprop
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.errors import ArgumentError, ExchangeError, UnsupportedError
from support.methods import LinearFreezing, tuner
from support.models import After, Classifier, ConvNet, fit, images, left_behind, loader, mlp, slow
from support.ranks import EXCHANGE_TIMEOUT, Failure, all_well, in_ranks

STEPS = 20
DEPTHS = {"uniform": "uniform", "temporal": "temporal", "given": None}
SETTINGS = {
    "sgd": ("sgd", {}),
    "adamw, accumulation, clipping": ("adamw", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
}


class Wide(Classifier):
    """Whose layer modules differ in size, in a fixed order of batches without dropout."""

    def __init__(self, optimizer="sgd"):
        torch.manual_seed(0)
        super().__init__(ConvNet((4, 6, 8), dropout=0), optimizer=optimizer)


def train(ranks, *callbacks, module=None, steps=STEPS, ddp=None, data=None, timeout=EXCHANGE_TIMEOUT, **arguments):
    """Digests of the weights after each batch, the weights at the end, and the Trainer."""
    module, digests = module or Wide(), []
    look = After(lambda _, it: digests.append(digest(dict(it.named_parameters()))))
    strategy = DDPStrategy(timeout=timeout, **(ddp or {}))
    data = loader(images(40 * ranks)) if data is None else data
    arguments = {"epochs": -1, "max_steps": steps, **arguments}
    trainer = fit(module, *callbacks, look, data=data, devices=ranks, strategy=strategy, **arguments)
    assert [name for name in left_behind(module) if name] == []  # DDP leaves a ``forward`` on the module itself
    return digests, [p.detach().numpy() for p in module.parameters()], trainer


def weights_of(ranks, *callbacks, **arguments):
    return train(ranks, *callbacks, **arguments)[:2]


def both_ways(ranks, depths, optimizer, arguments):
    depths = [1, *[3] * (ranks - 1)] if depths is None else depths
    results = {}
    for exchange in ("contributors", "all"):
        callback = StructuredPartialBackprop(depths, exchange=exchange)
        # In double precision: AdamW makes a step of what is left of a rounding error.
        found = weights_of(ranks, callback, module=Wide(optimizer), precision="64-true", **arguments)
        results[exchange] = *found, callback.contributions
    return results


class Hooks(L.Callback):
    """Registers a hook as a user does; Lightning's own way is for GPUs only."""

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)


def refusals(ranks):
    """Messages that all ranks get, after which training works."""
    found = {}

    def expect(name, kind, *callbacks, **arguments):
        with pytest.raises(kind) as caught:
            train(ranks, *callbacks, steps=3, **arguments)
        found[name] = str(caught.value)

    uniform = StructuredPartialBackprop("uniform")
    expect("number", ArgumentError, StructuredPartialBackprop([3] * (ranks + 1)))
    expect("share", ArgumentError, StructuredPartialBackprop([2] * ranks))
    expect("long", ArgumentError, StructuredPartialBackprop([9] * ranks))
    expect("unused", UnsupportedError, uniform, ddp={"find_unused_parameters": True})
    expect("static", UnsupportedError, uniform, ddp={"static_graph": True})
    few = DataLoader(images(8 * (3 + dist.get_rank())), batch_size=8)
    expect("batches", UnsupportedError, uniform, data=few, use_distributed_sampler=False)
    expect("hook", UnsupportedError, Hooks(), uniform)
    return found


def everything(ranks):
    pairs = itertools.product(DEPTHS, SETTINGS)
    found = {(name, setting): both_ways(ranks, DEPTHS[name], *SETTINGS[setting]) for name, setting in pairs}
    found["plain"] = weights_of(ranks)
    found["whole"] = weights_of(ranks, StructuredPartialBackprop([3] * ranks))
    found["weighted"] = weights_of(ranks, StructuredPartialBackprop("weighted", min_share=0.01))
    views = {"gradient_as_bucket_view": True}
    found["views"] = weights_of(ranks, StructuredPartialBackprop("uniform"), ddp=views, precision="64-true")
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))
    found["scaler"] = weights_of(ranks, StructuredPartialBackprop("uniform"), plugins=[scaler])
    freezing, partial = LinearFreezing(), StructuredPartialBackprop("uniform")
    for order in ([freezing, partial], [partial, freezing]):
        digests, weights, _ = train(ranks, *order, steps=12)
        found["freezing", order[0] is freezing] = digests, weights, partial.contributions, partial.savings().steps
    searching = tuner({"lr": LogUniform(1e-3, 1)}, at_epochs=(1,), max_trials=3)
    found["tuning"] = weights_of(ranks, StructuredPartialBackprop("uniform"), searching, epochs=3, steps=-1)
    found["searches"] = [len(one.branches) for one in searching.searches]
    found["refused"] = refusals(ranks)
    return found


@pytest.fixture(scope="module", params=[2, slow(4)])
def results(request):
    return request.param, all_well(in_ranks(request.param, everything, request.param))


def assert_ranks_equal(found):
    assert all(digests == found[0] for digests in found)
    assert len(set(found[0])) > 5


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("depths", DEPTHS)
def test_both_exchanges_train_alike(results, depths, setting):
    ranks, found = results
    for exchange in ("contributors", "all"):
        assert_ranks_equal([one[depths, setting][exchange][0] for one in found])
    mean, rescaled = (found[0][depths, setting][exchange] for exchange in ("contributors", "all"))
    if ranks == 2:
        assert mean[0] == rescaled[0]  # two summands have one order
    else:
        pairs = zip(mean[1], rescaled[1], strict=True)
        assert all(abs(a - b).max() < 1e-8 for a, b in pairs)
    assert mean[2] == rescaled[2]
    assert list(mean[2].values()) == sorted(mean[2].values())


def test_contributions_are_counted_over_ranks(results):
    ranks, found = results
    first = list(found[0]["uniform", "sgd"]["contributors"][2].values())
    by_place = [-(-(place + 1) * 3 // ranks) for place in range(ranks)]
    each = [sum(length >= 3 - index for length in by_place) for index in range(3)]
    assert first == [ranks + (STEPS - 1) * count for count in each]  # the first step shows the layer modules


def test_whole_suffixes_are_plain_ddp(results):
    _, found = results
    for one in found:
        assert one["whole"][0] == one["plain"][0]


@pytest.mark.parametrize("name", ["weighted", "views", "scaler", "tuning"])
def test_ranks_stay_equal(results, name):
    _, found = results
    assert_ranks_equal([one[name][0] for one in found])


def test_trials_of_settings_train_whole_steps(results):
    _, found = results
    assert [one["searches"] for one in found] == [[3]] * len(found)


def test_bucket_views_change_nothing(results):
    ranks, found = results
    if ranks == 2:
        assert found[0]["views"][0] == found[0]["uniform", "sgd"]["contributors"][0]


@pytest.mark.parametrize("freezing_first", [True, False])
def test_suffixes_begin_at_the_frozen_depth(results, freezing_first):
    ranks, found = results
    assert_ranks_equal([one["freezing", freezing_first][0] for one in found])
    _, _, contributions, steps = found[0]["freezing", freezing_first]
    counts = list(contributions.values())
    assert steps == 11  # freezing finds the layer modules in the first step
    assert counts[0] < counts[1] < counts[2] == steps * ranks


def test_what_cannot_work_is_refused_on_all_ranks(results):
    ranks, found = results
    expected = {
        "number": f"a number for each of {ranks} ranks",
        "share": f"needs 1 of {ranks} ranks with depths of 3, the whole chain",
        "long": "depths must be at most 3, the number of layer modules",
        "unused": "find_unused_parameters=True lets ranks lack gradients",
        "static": "static_graph=True promises DDP",
        "batches": f"have {', '.join(str(3 + rank) for rank in range(ranks))} training batches",
        "hook": "a communication hook changes how DDP exchanges gradients",
    }
    for one in found:
        assert {name for name, text in expected.items() if text not in one["refused"][name]} == set()


class InjectedError(Exception):
    pass


class Fails(Wide):
    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.global_rank == 1:
            raise InjectedError
        return super().training_step(batch, batch_idx)


class Endless(IterableDataset):
    """As many samples as it says, which a loader does not know."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter([images(1)[0]] * self.samples)


def fail(what):
    if what == "raises":
        return weights_of(2, StructuredPartialBackprop("uniform"), module=Fails())
    rank = int(os.environ["LOCAL_RANK"])
    module = Classifier(nn.Sequential(nn.Flatten(), mlp(64, 3)))  # without statistics, which DDP sends before a forward
    data, timeout = DataLoader(Endless(8 * (12 - 6 * rank)), batch_size=8), EXCHANGE_TIMEOUT / 24  # 10 s
    train(2, StructuredPartialBackprop("uniform"), module=module, data=data, timeout=timeout, epochs=1, steps=-1)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raises", "ends early"])
def test_a_rank_that_does_not_come_is_told(what):
    first, second = in_ranks(2, fail, what, timeout_s=120)
    assert isinstance(first, Failure)
    assert isinstance(first.error, ExchangeError), first.text
    assert "A rank has failed, or has fewer batches" in str(first.error)
    assert isinstance(second, Failure) == (what == "raises")


class Checkpoints(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}")


def resume(folder, depths, exchange):
    def run(*callbacks, **arguments):
        partial = StructuredPartialBackprop(depths, exchange=exchange)
        arguments = {"epochs": 5, "max_steps": -1, **arguments}
        digests, _, _ = train(2, partial, *callbacks, module=Wide("adamw"), **arguments)
        return digests, partial.contributions

    whole, contributions = run(Checkpoints(folder))
    for epoch in (0, 2):  # in the middle of a rotation, and of a cycle
        resumed, again = run(ckpt_path=folder / f"{epoch}")
        assert resumed == whole[-len(resumed) :]
        assert len(resumed) == 5 * (4 - epoch)
        assert again == contributions
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depths", "exchange"), [("uniform", "contributors"), ("temporal", "contributors"), ("uniform", "all")]
)
def test_ranks_that_resume_go_on_bit_for_bit(tmp_path, depths, exchange):
    first, second = all_well(in_ranks(2, resume, tmp_path, depths, exchange))
    assert first == second
