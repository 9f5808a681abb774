"""Tracing: who reads whom, what lies between, and what is refused."""

import pytest
import torch
from pipeline_runs import Branches, data
from torch import nn

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.pipelining.tracing import TracedModel, seeded
from lightning_egeria.pipelining.units import find_units


def call(model, batch):
    return model(batch)


def traced(model=None, units=None):
    model = model or Branches()
    return TracedModel(model, call, units or find_units(model, 10))


def test_units_read_each_other_through_what_lies_between():
    found = traced()
    readers = {found.unit_of[node]: [found.unit_of[one] for one in found.reads(node)] for node in found.unit_of}
    assert readers["left.0"] == ["embed"]
    assert readers["right"] == ["embed", "inner.0", "inner.1"] or set(readers["right"]) == {"inner.0", "inner.1"}
    assert set(readers["head"]) == {"embed", "norm", "right"}
    assert {found.unit_of[node] for node in found.reads(found.output)} == {"head", "words"}


def test_evaluating_all_nodes_is_the_forward():
    model = Branches().eval()
    found, values, batch = traced(model), {}, data()
    for node in found.nodes:
        values[node] = found.evaluate(node, values, batch)
    for one, other in zip(values[found.output], model(batch), strict=True):
        assert torch.equal(one, other)


def test_random_operations_are_found():
    found = traced(Branches(dropout=0.5))
    found.find_random(data())
    assert [str(node.target) for node in found.random] == ["model.left.1"]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, batch):
        x = self.first(batch)
        x.add_(1)
        return self.second(x)


def test_a_change_in_place_is_refused():
    with pytest.raises(UnsupportedError, match="changes its input in place"):
        traced(InPlace()).find_random(torch.ones(2, 2))


class ByValue(InPlace):
    def forward(self, batch):
        return self.first(batch) if batch.sum() > 0 else self.second(batch)


def test_control_flow_by_value_is_refused():
    with pytest.raises(UnsupportedError, match="cannot trace the model between the modules of stages"):
        traced(ByValue())


def test_seeded_numbers_repeat_and_leave_the_others():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with seeded(1, 2):
        first = torch.rand(1)
    with seeded(1, 2):
        assert torch.equal(first, torch.rand(1))
    assert torch.equal(expected, torch.rand(1))
