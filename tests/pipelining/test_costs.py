"""Costs of units, and units that must stay together."""

import torch
from torch import nn

from lightning_egeria.methods.pipelining.costs import learning_now, measured_graph
from lightning_egeria.methods.pipelining.tracing import TracedModel
from lightning_egeria.methods.pipelining.units import find_units
from support.pipelining.pipeline_runs import Branches, data


def graph_of(model, batch):
    traced = TracedModel(model, lambda model, batch: model(batch), find_units(model, 10))
    traced.find_random(batch)
    graph, groups = measured_graph(traced, model, batch)
    return learning_now(graph, groups, traced, model), groups


def test_nodes_have_costs_and_a_frozen_front_has_no_backward():
    model = Branches()
    model.embed.requires_grad_(False)
    model.scale.requires_grad_(False)
    graph, groups = graph_of(model, data())
    nodes = {node.name: node for node in graph.nodes}
    assert [*nodes] == [group[0] for group in groups]
    assert nodes["embed"].backward_s == nodes["embed"].activation_bytes == 0
    assert nodes["right"].backward_s > 0
    assert nodes["right"].parameter_bytes == 4 * 4 * (8 * 8 + 8)
    assert nodes["embed"].parameter_bytes == 4 * 12 * 8  # no gradient, no optimizer state
    assert nodes["right"].output_bytes == 4 * 8 * 10


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, batch):
        return self.first(batch), self.second(batch)


def test_a_frozen_unit_beside_the_loss_has_its_backward():
    model = Two()
    model.second.requires_grad_(False)
    graph, _ = graph_of(model, torch.ones(1, 2))
    assert [node.name for node in graph.nodes if node.backward_s > 0] == ["first", "second"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.between, self.end = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, batch):
        return self.end(self.shared(self.between(self.shared(batch))))


def test_a_module_called_twice_stays_with_those_between():
    _, groups = graph_of(Twice(), torch.ones(1, 2))
    assert groups == [["shared", "between"], ["end"]]
