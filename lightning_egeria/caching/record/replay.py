"""A recorded computation once more, for other samples of its batch.

Three numbers differ. A *place* is a row of the batch as the program sees it. A *position* is a sample as it was
loaded: the collate function may have put them in another order (`Tape.order`). A *stack* is the node of all samples'
tensors in one, which a batch begins with; *rows* are the nodes of single samples, of which a stack is made.

1.  Stacks that have a value are cut to the places. They are not made of their rows once more, since loading a sample
    again may draw other random numbers.
2.  Rows whose stack has no value are loaded, for the wanted positions only.
3.  The operations run in the order of recording. `waiting` counts the operations that still read a value, which is let
    go with the last one: a replay takes no more memory than the forward pass did.

Sizes in a program may be written for the whole batch. Such an operation fails or returns another number of rows, and
the replay is None: the caller computes the batch as it came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_egeria.caching.record.tape import Node
from lightning_egeria.core.snapshots.digests import is_dense
from lightning_egeria.errors import CacheError


def replay(
    node: Node,
    places: Sequence[int],
    given: Mapping[Node, Tensor] | None = None,
    outside: Callable[[Node], Tensor | None] = lambda leaf: leaf.value,
    has_samples: Callable[[Node], bool] | None = None,
) -> Tensor | None:
    """Compute a node again for some samples of its batch, in any order and repeated where a place is.

    Args:
        node: a result of recorded operations.
        places: numbers of rows of the batch.
        given: values of nodes for these samples, in the place of what they are computed from.
        outside: returns the value of a tensor from outside, for all samples; None if that is not known.
        has_samples: whether one has a row for each sample; None goes by its shape.

    Returns:
        The value, ``[places, ...]``; None if the computation does not fit other samples, or another number.
    """
    values: dict[Node, Tensor] = dict(given or {})
    tape = node.tape
    positions = [tape.order[place] for place in places] if tape.order is not None else list(places)
    # The rows themselves are wanted only where their stack is not there; loading them again might give others.
    order = node.before(lambda one: one in values)
    stacks = [one for one in order if one.rows is not None and one.value is not None]
    for one in stacks:
        values[one] = _known(one)[torch.tensor(list(places), device=one.meta.device)]
    order = node.before(lambda one: one in values)
    stacked = {argument for one in order if one.rows is not None for argument in one.arguments()}
    wanted = set(positions)
    tape.load(one for one in order if one.row is not None and (one not in stacked or one.row[0] in wanted))
    rows = {one.row: one for one in order if one.row is not None}
    waiting = Counter(argument for one in order for argument in one.arguments())
    for one in order:
        if one in values or (one.row is not None and one in stacked):
            continue
        if one.rows is not None:
            values[one] = _stacked([_known(rows[position, one.rows]) for position in positions])
        elif one.row is not None:
            if len(places) != tape.size or tape.order not in (None, list(range(tape.size))):
                return None
            values[one] = _known(rows.get((places[one.row[0]], one.row[1]), one))
        elif one.call is None:
            value = outside(one)
            if value is None:
                return None
            has_rows = value.ndim > 0 and value.shape[0] == tape.size and (has_samples is None or has_samples(one))
            values[one] = value[torch.tensor(places, device=value.device)] if has_rows else value
        else:
            try:
                results = one.call(values, len(places))
            except Exception:  # a shape is written into the program, or an index; the program itself has run
                return None
            if len(results) != len(one.siblings):
                return None
            values.update(zip(one.siblings, results, strict=True))
        for argument in one.arguments():
            waiting[argument] -= 1
            if not waiting[argument]:
                values.pop(argument, None)
    found = values[node]
    return found if found.ndim and found.shape[0] == len(places) else None


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows; in front of a GPU in pinned memory, which it reads faster, and which is used again."""
    form = rows[0].shape, rows[0].dtype
    if not torch.cuda.is_initialized() or not all(_is_plain(row) and (row.shape, row.dtype) == form for row in rows):
        return torch.stack(list(rows))
    made = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=True)
    copy_rows(rows, made)
    return made


def copy_rows(rows: Sequence[Tensor], into: Tensor) -> None:
    """Copy contiguous rows into a tensor, in one thread: those of torch wait for one another where workers load data.

    >>> made = torch.empty(2, 3)
    >>> copy_rows([torch.ones(3), torch.zeros(3)], made)
    >>> made.tolist()
    [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    for place, row in zip(into.flatten().view(torch.uint8).numpy().reshape(len(rows), -1), rows, strict=True):
        place[:] = row.flatten().view(torch.uint8).numpy()


def _is_plain(row: Tensor) -> bool:
    if type(row) is not Tensor or row.device.type != "cpu" or row.requires_grad or not row.numel():
        return False
    return row.is_contiguous() and is_dense(row)


def _known(node: Node) -> Tensor:
    if node.value is None:
        raise CacheError("a leaf of a recorded computation has no value")
    return node.value
