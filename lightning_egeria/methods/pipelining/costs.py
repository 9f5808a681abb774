"""Measuring what each unit of a model costs, for the planner."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_egeria.methods.pipelining.graph import ComputationGraph, Node
from lightning_egeria.methods.pipelining.tracing import TracedModel, tensors_of

STATES = 4  # numbers for each weight that trains: itself, its gradient, two of Adam


def measured_graph(traced: TracedModel, model: nn.Module, batch: Any) -> tuple[ComputationGraph, list[list[str]]]:
    """Return the graph of a model's units with measured costs, and the units of each node.

    Units that read each other, such as one that is called twice with another between, become one node. The output
    belongs to the node that it reads last.

    Args:
        traced: the model's operations, after `TracedModel.find_random`.
        model: the model.
        batch: one micro-batch, on the CPU.
    """
    units = list(dict.fromkeys(traced.unit_of.values()))
    costs = {unit: [0.0, 0.0, 0, 0] for unit in units}
    values: dict[fx.Node, Any] = {}
    for node in traced.nodes:
        if node in traced.unit_of:
            values[node] = _measured(traced, node, values, batch, costs[traced.unit_of[node]])
        else:
            values[node] = traced.evaluate(node, values, batch)
    reads = {(traced.unit_of[first], unit) for node, unit in traced.unit_of.items() for first in traced.reads(node)}
    last = traced.reads(traced.output)[-1]
    reads |= {(traced.unit_of[first], traced.unit_of[last]) for first in traced.reads(traced.output)}
    groups = _groups(units, reads)
    modules = dict(model.named_modules())
    nodes = []
    for group in groups:
        weights = {id(p): p for unit in group for p in modules[unit].parameters()}.values()
        nodes.append(
            Node(
                group[0] if len(group) == 1 else f"{group[0]}+{len(group) - 1}",
                sum(costs[unit][0] for unit in group),
                sum(costs[unit][1] for unit in group),
                int(sum(costs[unit][2] for unit in group)),
                sum(weight.nbytes * (STATES if weight.requires_grad else 1) for weight in weights),
                int(sum(costs[unit][3] for unit in group)),
            )
        )
    home = {unit: number for number, group in enumerate(groups) for unit in group}
    edges = {(home[first], home[second]) for first, second in reads if home[first] != home[second]}
    return ComputationGraph(tuple(nodes), tuple(sorted(edges))), groups


def learning_now(
    graph: ComputationGraph, groups: list[list[str]], traced: TracedModel, model: nn.Module
) -> ComputationGraph:
    """Return a measured graph with backwards and kept activations where something trains now, and only there.

    A backward that was not measured, because all was frozen then, counts as twice the forward.
    """
    learning, modules, nodes = _learning(traced), dict(model.named_modules()), []
    for node, group in zip(graph.nodes, groups, strict=True):
        weights = {id(p): p for unit in group for p in modules[unit].parameters()}.values()
        held = sum(weight.nbytes * (STATES if weight.requires_grad else 1) for weight in weights)
        learns = any(unit in learning for unit in group)
        # A module that is too fast for the clock has a backward, too.
        backward = max(1e-9, node.backward_s or 2 * node.forward_s) if learns else 0.0
        kept = (node.activation_bytes or node.output_bytes) if learns else 0
        nodes.append(dataclasses.replace(node, backward_s=backward, activation_bytes=kept, parameter_bytes=held))
    return ComputationGraph(tuple(nodes), graph.edges)


def _learning(traced: TracedModel) -> set[str]:
    """Return the units with a backward: something in them or in front of them trains."""
    trains: dict[fx.Node, bool] = {}
    for node in traced.nodes:
        reads = traced.trains(node) or any(trains[other] for other in node.all_input_nodes)
        trains[node] = reads and traced.is_recorded(node)
    found = {unit for node, unit in traced.unit_of.items() if trains[node]}
    if trains[traced.output] or any(
        weight.requires_grad for weight in traced.rest
    ):  # the loss has a backward, even where the unit beside it has none
        found.add(traced.unit_of[traced.reads(traced.output)[-1]])
    return found


def _measured(traced: TracedModel, node: fx.Node, values: dict[fx.Node, Any], batch: Any, cost: list[Any]) -> Any:
    weights = {id(parameter) for parameter in traced.weights(node)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    given = {
        other: pytree.tree_map(
            lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value
        )
        for other, value in values.items()
        if other in node.all_input_nodes
    }
    forward, backward, value = [], [], None
    for _ in range(2):  # of which the faster one counts
        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = traced.evaluate(node, given, batch)
        middle = time.perf_counter()
        ends = [leaf for leaf in tensors_of(value) if leaf.requires_grad]
        trained = [leaf for one in given.values() for leaf in tensors_of(one) if leaf.requires_grad]
        trained += [parameter for parameter in traced.weights(node) if parameter.requires_grad]
        if ends and trained:
            torch.autograd.grad(ends, trained, [torch.ones_like(leaf) for leaf in ends], allow_unused=True)
        forward.append(middle - started)
        backward.append(time.perf_counter() - middle if ends and trained else 0.0)
    cost[0] += min(forward)
    cost[1] += min(backward)
    cost[2] += sum(kept.values())
    cost[3] += sum(leaf.nbytes for leaf in tensors_of(value))
    return pytree.tree_map(
        lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value
    )


def _groups(units: list[str], reads: set[tuple[str, str]]) -> list[list[str]]:
    """Return units in an order in which they can run; those that read each other are together."""
    reach = {unit: {second for first, second in reads if first == unit} for unit in units}
    for middle in units:
        for unit in units:
            if middle in reach[unit]:
                reach[unit] |= reach[middle]
    groups: list[list[str]] = []
    for unit in units:
        together = [other for other in units if other == unit or (other in reach[unit] and unit in reach[other])]
        if together not in groups:
            groups.append(together)
    order: list[list[str]] = []
    while len(order) < len(groups):
        done = {unit for group in order for unit in group}
        order.append(
            next(
                group
                for group in groups
                if group not in order
                and all(first in done or first in group for first, second in reads if second in group)
            )
        )
    return order
