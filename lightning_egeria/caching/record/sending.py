"""Lazy tensors on their way from a worker process to the training process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.meta import Meta, stacked
from lightning_egeria.caching.record.tape import UNKNOWN, Node, Tape
from lightning_egeria.caching.record.tensors import LazyTensor, plain, show
from lightning_egeria.core.batches.rows import Index, Rows
from lightning_egeria.core.batches.tree import change_leaves

MAX_STEPS = 20_000  # operations in a collate function that are sent to the training process


@dataclasses.dataclass(frozen=True)
class Sent:
    """A lazy tensor on its way from a worker process: operations in order, the last one is the tensor itself.

    Attributes:
        steps: for each node, its row or its operation, as plain values.
        names: of the nodes, so that tensors with nodes in common have them in common again; None for one without.
        bases: places of the nodes whose memory they share; None for one with its own.
        value: the tensor, if it is there.
        rows: values of rows, one behind the other: to send many tensors takes long.
        attributes: what the program has set on the tensor.
    """

    steps: tuple[Any, ...]
    names: tuple[int | None, ...]
    bases: tuple[int | None, ...]
    value: Tensor | None
    rows: Tensor | None = None
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A value among the rows that are sent together."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Step:
    """An earlier step, among the arguments of an operation."""

    number: int


@dataclasses.dataclass(frozen=True)
class SentRows:
    """A lazy tensor that stacks tensor ``number`` of each sample, in the order of the plan; ``row`` is what one is."""

    number: int
    row: Meta


def send(batch: Any, keep_rows: bool = False) -> Any:
    """Return the batch with its lazy tensors as plain descriptions; a tensor without a name is sent as it is.

    A tensor that is there twice has one description, and what shares memory here does so where it arrives: if one of
    them cannot be described, all are sent as they are.

    Args:
        batch: a batch of one tape.
        keep_rows: send the rows that are loaded too, besides the tensors that they are stacked to.
    """
    known: dict[int, Any] = {}
    lazies: list[LazyTensor] = []
    change_leaves(batch, LazyTensor, lazies.append)
    orders = {id(lazy): lazy.node.before(lambda _: False) for lazy in lazies}
    as_they_are = {lazy.node.root for lazy in lazies if not _can_be_described(lazy.node, orders[id(lazy)])}

    def once(lazy: LazyTensor) -> Any:
        if id(lazy) not in known:
            known[id(lazy)] = as_it_is(lazy) if lazy.node.root in as_they_are else describe(lazy)
        return known[id(lazy)]

    def as_it_is(lazy: LazyTensor) -> Tensor:
        value = plain(lazy).detach() if lazy.attributes else plain(lazy)
        vars(value).update(lazy.attributes)
        return value

    def describe(lazy: LazyTensor) -> Any:
        order = orders[id(lazy)]
        loaded = all(node.value is not None for node in order if node.row is not None)
        value = plain(lazy) if loaded else None
        places = {node: at for at, node in enumerate(order)}
        stacked = {row for node in order if node.rows is not None for row in node.arguments()}
        keep = keep_rows or any(node.row is not None and node not in stacked for node in order)
        together = _alike([node for node in order if keep and node in stacked and node.value is not None])
        steps: list[tuple[Any, ...]] = []
        for node in order:
            if node.row is not None:
                row = together.get(node)
                steps.append((node.row, node.meta, row if row is not None else node.value if keep else None))
            elif node.call is not None:
                flat = tuple(_Step(places[leaf]) if isinstance(leaf, Node) else leaf for leaf in node.call.flat)
                stack = node.value if node.rows is not None else None  # rows are taken of it, not loaded again
                steps.append((str(node.call.run), flat, node.call.spec, node.meta, stack))
            else:
                steps.append((node.value,))
        rows = torch.stack([node.value for node in together if node.value is not None]) if together else None
        names = tuple(node.number for node in order)
        bases = tuple(places.get(node.base) if node.base is not None else None for node in order)
        return Sent(tuple(steps), names, bases, value, rows, lazy.attributes)

    return change_leaves(batch, LazyTensor, once)


def _can_be_described(node: Node, order: Sequence[Node]) -> bool:
    return node.name != UNKNOWN and len(order) <= MAX_STEPS and all(len(one.siblings) <= 1 for one in order)


def _alike(nodes: Sequence[Node]) -> dict[Node, _Row]:
    """Number the nodes whose values have the same form, and no gaps."""
    form = nodes[0].meta if nodes else None
    values = [(node, node.value) for node in nodes if node.meta == form and node.value is not None]
    alike = [node for node, value in values if value.is_contiguous() and not value.requires_grad]
    return {node: _Row(at) for at, node in enumerate(alike)} if len(alike) > 1 else {}


def joined(parts: Sequence[tuple[LazyTensor, Sequence[int]]]) -> Sent | None:
    """Describe some rows of lazy tensors as one tensor, whose rows are numbered from 0.

    Args:
        parts: tensors that stack a tensor of each sample, and numbers of their rows.

    Returns:
        The tensor; None if one is something else.
    """
    rows: list[tuple[Any, ...]] = []
    number = parts[0][0].node.rows
    for lazy, chosen in parts:
        node = lazy.node
        if node.rows is None or node.rows != number or node.call is None:
            return None
        for at in chosen:
            row, value = node.call.flat[at], node.value
            rows.append(((len(rows), number), row.meta, row.value if value is None else value[at]))
    if any(meta != rows[0][1] for _, meta, _ in rows):
        return None
    flat, spec = pytree.tree_flatten((([_Step(at) for at in range(len(rows))],), {}))
    stack = str(torch.ops.aten.stack.default), tuple(flat), spec, stacked(rows[0][1], len(rows)), None
    return Sent((*rows, stack), (None,) * (len(rows) + 1), (None,) * (len(rows) + 1), None)


def joined_rows(parts: Sequence[tuple[Rows, Index]]) -> Any:
    """Return some rows of batches as one batch; None if they differ in their form, or stand for what cannot be named.

    Args:
        parts: batches, and numbers of their rows.
    """
    first, _ = parts[0]
    if any(one.form != first.form for one, _ in parts):
        return None
    columns = [_joined_column([(one.columns[at], rows) for one, rows in parts]) for at in range(len(first.columns))]
    if any(column is None for column in columns):
        return None
    return Rows(first.structure, columns, sum(len(rows) for _, rows in parts)).batch()


def _joined_column(parts: Sequence[tuple[Any, Index]]) -> Any:
    if not any(isinstance(values, LazyTensor) for values, _ in parts):
        return Rows.joined([Rows(None, [values], len(values)).take(rows) for values, rows in parts]).columns[0]
    if not all(isinstance(values, LazyTensor) for values, _ in parts):
        return None
    return joined([(values, rows.tolist()) for values, rows in parts])


def receive(batch: Any, tape: Tape) -> Any:
    """Return the batch with lazy tensors on ``tape`` for what `send` has described."""
    rows: dict[tuple[int, int], Node] = {}
    named: dict[int, Node] = {}
    shown: dict[int, Tensor] = {}

    def once(sent: Sent | SentRows) -> Tensor:
        if id(sent) not in shown:
            if isinstance(sent, SentRows):
                shown[id(sent)] = show(tape.rows_of(sent.number, sent.row))
            else:
                shown[id(sent)] = arrive(sent)
        return shown[id(sent)]

    def arrive(sent: Sent) -> Tensor:
        nodes: list[Node] = []
        for step, name, base in zip(sent.steps, sent.names, sent.bases, strict=True):
            if name in named:
                nodes.append(named[name])
            elif len(step) == 3:
                row, meta, value = step
                if isinstance(value, _Row):
                    value = sent.rows[value.number] if sent.rows is not None else None
                if row not in rows:
                    rows[row] = tape.row(row[0], row[1], meta, value)
                nodes.append(rows[row])
            elif len(step) == 1:
                nodes.append(tape.outside(step[0]))
            else:
                func, flat, spec, meta, stack = step
                arguments = [nodes[leaf.number] if isinstance(leaf, _Step) else leaf for leaf in flat]
                made = tape.record(func, operation(func), arguments, spec, [meta])
                if made is None:
                    raise TypeError(f"an argument of {func} has no name")
                made[0].value = stack
                made[0].base = nodes[base] if base is not None else None
                nodes.append(made[0])
            if name is not None:
                named[name] = nodes[-1]
        nodes[-1].value = sent.value
        lazy = show(nodes[-1])
        vars(lazy).update(sent.attributes)
        return lazy

    return change_leaves(batch, (Sent, SentRows), once)


def operation(name: str) -> Any:
    """Return an operation of torch by its full name, such as ``aten.stack.default``."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
