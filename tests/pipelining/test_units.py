"""Units: which modules are shared out."""

from torch import nn

from lightning_egeria.methods.pipelining.units import find_units, has_state, modules_around
from support.pipelining.pipeline_runs import Branches


def test_a_container_counts_as_its_parts():
    assert find_units(Branches(), 10**6)[:3] == ["embed", "left.0", "left.3"]


def test_code_around_units_is_that_of_modules_with_a_unit_inside():
    model = Branches()
    assert modules_around(model, ["left.0", "head"]) == [model, model.left]
    assert not has_state(nn.ReLU())
