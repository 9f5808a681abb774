"""Which strategies freezing is refused with, and why."""

from types import SimpleNamespace

import pytest

from lightning_egeria.core.training.methods import FREEZING
from lightning_egeria.core.training.support import check_strategy
from lightning_egeria.errors import UnsupportedError


def strategy_with(name, **attributes):
    """A strategy with this class name; `lightning` and `pytorch_lightning` have a class each."""
    defaults = {"_ddp_kwargs": {}, "_model_averaging_period": None}
    return type(name, (), {**defaults, **attributes})()


def mesh(tensor_parallel):
    return {"tensor_parallel": SimpleNamespace(size=lambda: tensor_parallel)}


@pytest.mark.parametrize("name", FREEZING.strategies)
def test_strategies_that_were_tried_pass(name):
    check_strategy(strategy_with(name, device_mesh=mesh(1)), FREEZING, allow_untested=False)


REFUSED = [
    ("FSDPStrategy", {}, "FSDP1 flattens several layers"),
    ("DeepSpeedStrategy", {}, "DeepSpeed partitions the optimizer"),
    ("XLAStrategy", {}, "not tested with XLAStrategy"),
    ("DDPStrategy", {"_ddp_kwargs": {"static_graph": True}}, "static_graph=True"),
    ("DDPStrategy", {"_model_averaging_period": 4}, "post-local SGD"),
    ("ModelParallelStrategy", {"device_mesh": mesh(2)}, "tensor_parallel_size=1"),
]


@pytest.mark.parametrize(("name", "attributes", "reason"), REFUSED)
def test_others_are_refused_with_a_reason(name, attributes, reason):
    with pytest.raises(UnsupportedError, match=f"{reason}.*allow_untested=True trains anyway, at your own risk"):
        check_strategy(strategy_with(name, **attributes), FREEZING, allow_untested=False)


@pytest.mark.parametrize(("name", "attributes", "reason"), REFUSED)
def test_or_only_warned_of(name, attributes, reason):
    with pytest.warns(UserWarning, match=f"freezing: .*{reason}"):
        check_strategy(strategy_with(name, **attributes), FREEZING, allow_untested=True)


def test_what_to_use_instead_is_said():
    with pytest.raises(UnsupportedError, match=r"Use strategy='ddp' or ModelParallelStrategy \(FSDP2\)"):
        check_strategy(strategy_with("FSDPStrategy"), FREEZING, allow_untested=False)
