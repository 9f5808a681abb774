"""Tracing: who reads whom, what lies between, and what is refused."""

import pytest
import torch
from torch import nn

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.tracing import TracedModel
from lightning_egeria.methods.pipelining.units import find_units
from support.pipelining.pipeline_runs import Branches, data


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
    def __init__(self, change=None):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.change = change

    def forward(self, batch):
        return self.change(self, batch, self.first(batch))


def then_returned(model, batch, x):
    return torch.relu_(model.second(torch.relu_(x.mul_(2) + batch)))


def test_what_is_read_once_may_change_in_place():
    found = traced(InPlace(then_returned))
    batch = torch.randn(4, 2)
    expected = found.find_random(batch.clone())
    assert len(found.in_place) == 3
    values = {}
    for node in found.nodes:
        values[node] = found.evaluate(node, values, batch)
    assert torch.equal(values[found.output], expected)
    values[found.output].sum().backward()
    for node in found.nodes:  # each stage may compute it again
        if node.op != "placeholder":
            assert torch.equal(found.evaluate(node, values, batch).detach(), values[node].detach())


def then_read(model, batch, x):
    x.add_(1)
    return model.second(x)


def through_a_view(model, batch, x):
    x[:1].add_(1)
    return model.second(x)


def of_the_batch(model, batch, x):
    return model.second(x) + batch.mul_(2)


def of_a_weight(model, batch, x):
    return model.second(x) + model.first.bias.detach().mul_(2)


@pytest.mark.parametrize("change", [then_read, through_a_view, of_the_batch, of_a_weight])
def test_what_is_read_again_may_not_change_in_place(change):
    with pytest.raises(UnsupportedError, match="changes its input in place"):
        traced(InPlace(change)).find_random(torch.ones(2, 2))


class ByValue(InPlace):
    def forward(self, batch):
        return self.first(batch) if batch.sum() > 0 else self.second(batch)


def test_control_flow_by_value_is_refused():
    with pytest.raises(UnsupportedError, match="cannot trace the model between the modules of stages"):
        traced(ByValue())
