"""Whether a value is, row by row, a function of the samples: tried when the program asks for it first.

An entry is one row of a value, and is served in another batch than the one it was computed in. That is right only if
the row depends on nothing but its sample. What could break this, and what shows it:

* the value has no row for each sample, or follows from no sample: `why_not_a_row`;
* the program mixes samples in front of the frozen modules, as mixup does: `mixes_samples` gives every row the first
  sample, and compares the first row;
* a frozen module mixes them (batch statistics, attention across the batch), draws random numbers, or has other last
  bits at another place of the batch: `try_rows` runs the recorded computation on half of the samples at other places.

In a short run with a slow front, `policy.may_probe` saves the second run: the next epoch compares instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_egeria.caching.record.meta import version_of
from lightning_egeria.caching.record.outside import has_samples
from lightning_egeria.caching.record.replay import replay as replay_of
from lightning_egeria.caching.record.tape import Node
from lightning_egeria.caching.serve import is_rounding
from lightning_egeria.core.snapshots.digests import same_bits
from lightning_egeria.core.snapshots.random_state import RandomState, preserved_random_state

MIXED = "the output of one sample depends on the other samples of its batch"


def why_not_a_row(node: Node, value: Tensor) -> str | None:
    """Return why a value cannot be kept by sample, as far as its shape and its leaves tell; None if it may be."""
    size = node.tape.size
    leaves = node.leaves()
    if value.ndim == 0 or value.shape[0] != size:
        return f"its shape {tuple(value.shape)} does not begin with the {size} samples of the batch"
    if not any(leaf.row is not None for leaf in leaves) and not any(map(has_samples, leaves)):
        return "it depends on no tensor of the batch"
    if any(leaf.row is None and leaf.value is not None and leaf.version != version_of(leaf.value) for leaf in leaves):
        return "the frozen modules change their input in place"
    return None


def mixes_samples(node: Node) -> bool:
    """Whether the program mixes samples in front of the frozen modules; these do not run for it.

    Args:
        node: a value of a batch, with all rows loaded.
    """
    size = node.tape.size
    units = [one for one in node.before(lambda one: not one.frozen) if one.is_unit]
    made = {one for unit in units for one in unit.arguments() if not one.frozen and one.call and one.rows is None}
    with preserved_random_state(), torch.no_grad():
        for one in made:
            value = one.value if one.value is not None else replay_of(one, range(size))
            alone = replay_of(one, [0] * size)  # all samples are the first one
            if value is None or alone is None or value.shape[:1] != (size,) or value.shape != alone.shape:
                continue
            if not same_bits(alone[:1], value[:1]) and not is_rounding(alone[:1], value[:1]):
                return True
    return False


def try_rows(node: Node, value: Tensor, starts: Sequence[Node] = ()) -> tuple[str | None, bool]:
    """Run a recorded computation once more, on a batch of half of the samples at other places, and of one other.

    Rows that have the same bits there depend neither on their place nor on the other rows. If they differ, the half
    runs at its own places, where the bits must be the same whatever the precision; then a row at another place may
    differ by rounding.

    Args:
        node: a value of a batch, with all rows loaded.
        value: the same as the program got it, ``[samples, ...]``.
        starts: cached values that it is computed from, which are there; without one, the samples.

    Returns:
        Why it cannot be cached, or None; and whether rows are the same bits at each place in the batch.
    """
    size = node.tape.size

    def replay(node: Node, places: Sequence[int]) -> Tensor | None:
        given = {
            one: one.value[torch.tensor(places, device=one.meta.device)] for one in starts if one.value is not None
        }
        return replay_of(node, places, given)

    with preserved_random_state(), torch.no_grad():
        before = RandomState.current()
        if size == 1:
            again = replay(node, [0])
            return (None, True) if same_bits(again, value) else (_changes(value, again), False)
        places = list(range(size))
        half = places[::2]
        # Each of the half moves by half a batch; all others are one sample, so that a mean becomes another.
        shift = (size // 2) | 1
        moved = [(place - shift) % size // 2 * 2 if place % 2 else half[-1] for place in places]
        found = replay(node, moved)
        if RandomState.current() != before:
            return "the frozen modules draw random numbers", False
        if found is None:
            return "its computation fits only these samples (are they padded one by one?)", False
        kept = torch.tensor(range(1, size, 2), device=value.device)
        wanted = value[torch.tensor(moved, device=value.device)[kept]]
        if found.shape == value.shape and same_bits(found[kept], wanted):
            return None, True
        for first in (0, 1):
            mixed = replay(node, [place if place % 2 == first else 1 - first for place in places])
            if mixed is None or not same_bits(mixed[first::2], value[first::2]):
                return _changes(value, replay(node, places)), False
    if found.shape != value.shape or not is_rounding(found[kept], wanted):
        return "the output of a sample depends on its place in the batch", False
    return None, False


def _changes(value: Tensor, again: Tensor | None) -> str:
    if not same_bits(again, value):
        return "the same input gave another output (is it random, or does it depend on earlier batches?)"
    return MIXED
