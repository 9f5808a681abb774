"""The set-ups that partial backprop runs in, and the reason against each other one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_egeria import PrefixFreezing, StructuredPartialBackprop
from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.methods.partial.arguments import PartialArguments
from lightning_egeria.methods.partial.plans import TemporalPlan, UniformPlan
from lightning_egeria.methods.partial.support import check_batches, check_model, check_trainer, exchanged_layers
from support.models import Classifier, fit


def trainer_with(name, **settings):
    strategy = type(name, (), {"_ddp_kwargs": settings, "_model_averaging_period": None, "model": None})()
    module = SimpleNamespace(automatic_optimization=True)
    return SimpleNamespace(strategy=strategy, lightning_module=module, world_size=2, callbacks=[])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ModelParallelStrategy", "FSDP2 gathers weights and exchanges gradients in the backward of each layer"),
        ("FSDPStrategy", "FSDP1 flattens several layers"),
        ("DeepSpeedStrategy", "DeepSpeed exchanges gradients in buckets"),
        ("XLAStrategy", "partial backprop is not tested with XLAStrategy"),
    ],
)
def test_other_strategies_are_refused_with_the_reason(name, reason):
    with pytest.raises(UnsupportedError, match=f"{reason}.*Use one device, or strategy='ddp'"):
        check_trainer(trainer_with(name), PartialArguments(), None)


def test_ddp_that_ranks_would_wait_in_is_refused():
    check_trainer(trainer_with("DDPStrategy"), PartialArguments("uniform"), None)
    unused = trainer_with("DDPStrategy", find_unused_parameters=True)
    check_trainer(unused, PartialArguments("uniform", exchange="all"), None)
    with pytest.raises(UnsupportedError, match="find_unused_parameters=True lets ranks lack gradients"):
        check_trainer(unused, PartialArguments("uniform"), None)
    averaging = trainer_with("DDPStrategy")
    averaging.strategy._model_averaging_period = 4
    with pytest.raises(UnsupportedError, match="post-local SGD lets ranks differ"):
        check_trainer(averaging, PartialArguments("uniform"), None)


def test_layer_modules_beside_freezing_are_refused():
    with pytest.raises(ArgumentError, match="layer_modules must be given to PrefixFreezing only"):
        fit(Classifier(), PrefixFreezing(), StructuredPartialBackprop(layer_modules=["net.stem", "net.deep"]))


def test_synchronized_statistics_need_one_suffix_for_all():
    module, trainer = nn.Sequential(nn.SyncBatchNorm(4)), trainer_with("DDPStrategy")
    check_model(trainer, module, TemporalPlan(2, 0.25), PartialArguments())
    with pytest.raises(UnsupportedError, match="SyncBatchNorm exchanges gradients in its own backward"):
        check_model(trainer, module, UniformPlan(2, 0.25, 1), PartialArguments("uniform"))


def test_ranks_with_other_numbers_of_batches_are_told():
    ranks = Ranks()
    check_batches(ranks, 5)
    ranks.each = lambda values: [[5.0], [float("inf")], [3.0]]
    with pytest.raises(UnsupportedError, match=r"ranks 0, 1, \.\.\. have 5, unknown, 3 training batches"):
        check_batches(ranks, 5)


def test_each_parameter_that_trains_is_in_one_layer():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    chain = LayerChain.trace(net, lambda: net(torch.ones(3, 4)).sum())
    net[0].requires_grad_(False)  # as freezing does, and undoes later
    net[3].bias.requires_grad_(False)
    layers = exchanged_layers(net, chain, trainer_with("DDPStrategy"))
    assert layers == [list(net[0].parameters()), list(net[2].parameters()), [net[3].weight]]


@pytest.mark.parametrize("depths", ["uniform", "weighted"])
def test_one_process_has_whole_steps_and_a_warning(depths):
    plain, ours, callback = Classifier(), Classifier(), StructuredPartialBackprop(depths)
    fit(plain)
    with pytest.warns(UserWarning, match="there is only one process, so all steps are full. Use depths='temporal'"):
        fit(ours, callback)
    assert ours.losses == plain.losses
    assert set(callback.contributions.values()) == {15}


def test_a_list_for_one_process_needs_the_whole_chain():
    fit(Classifier(), StructuredPartialBackprop([3]), epochs=1)
    with pytest.raises(ArgumentError, match="needs 1 of 1 ranks with depths of 3, the whole chain, got"):
        fit(Classifier(), StructuredPartialBackprop([2]))
