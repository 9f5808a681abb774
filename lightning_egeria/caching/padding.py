"""Texts that are padded to another length: whether their output stays the same, tried on a few and then on each."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.caching.front import Front
from lightning_egeria.caching.levels import Lengths, Level
from lightning_egeria.caching.outputs import Some
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.lazy.outside import LEAST_PADDING, Outside
from lightning_egeria.lazy.tape import Node
from lightning_egeria.lazy.units import precision_of, without_casts
from lightning_egeria.snapshots.digests import same_bits
from lightning_egeria.snapshots.random_state import preserved_random_state
from lightning_egeria.training.notices import Notices

ROWS = 8  # at most that are run again, to compare two lengths
PADDING_STEP = 2**-14  # share of a channel's largest value by which a text may differ at another length, in float32
COARSE = 32  # last bits of a coarser precision by which it may
LEAST_SCALE = 2**-10  # of the median channel, for channels of nearly nothing


def judge_length(level: Level, outside: Outside, node: Node, notices: Notices) -> None:
    """Compute some samples of a padded batch with less padding, with none, and with more: is their output the same?

    Another length may take another kernel, so the bits may differ. Then it must be the same to rounding without
    autocast, where rounding is far smaller than whatever looks at the padding.

    Args:
        level: keeps the answer in `Level.padded`, which a batch without padding does not change.
        outside: tensors of the program.
        node: boundary activation of a batch that fits, ``[samples, length, ...]``.
        notices: takes messages.
    """
    if level.padded.version != outside.version:
        level.padded = Lengths(outside.version)
    lengths, length = level.padded, node.meta.shape[1]
    if not lengths.is_new(length):
        return
    own = outside.sample_lengths(node)
    outside.learn_padding(node)
    order = sorted(range(len(own)), key=own.__getitem__)
    # Where only the last values are equal, that may be no padding. The longest of these samples gets none.
    short = [place for place in order if own[place] <= length - LEAST_PADDING][:ROWS]
    tries = {max(1, own[short[-1]] - 1): short} if short else {}
    if (room := outside.room(node)) > length:
        tries[room] = order[-ROWS:]
    if not tries:
        return
    was_exact = lengths.exact
    judged = [_is_same(outside, node, places, other, was_exact) for other, places in tries.items()]
    exact, same = all(bits for _, bits in judged), all(fine for fine, _ in judged)
    lengths.judged(length, same, exact)
    if not same:
        notices.inform(
            "the output of a text depends on how far it is padded, as far as can be seen, so what was computed in a "
            "batch serves only batches of the same length",
            once="padding",
        )
    elif was_exact and not exact:
        notices.inform(
            "the last bits of a text's output depend on the length of its batch; they may differ from a run without "
            "the cache",
            once="length",
        )


def _is_same(outside: Outside, node: Node, places: list[int], other: int, bits: bool) -> tuple[bool, bool]:
    """Whether rows are the same at another length, to rounding; and whether they are the same bits, if that matters."""
    before = node.meta.shape[1]
    common = min(before, other)

    def both() -> list[Tensor]:
        found = [outside.replayed(node, places, length) for length in (before, other)]
        return [one[:, :common] for one in found if one is not None and one.ndim > 1 and one.shape[1] >= common]

    with preserved_random_state(), torch.no_grad():
        if bits:
            pair = both()
            if len(pair) < 2 or same_bits(*pair):
                return len(pair) == 2, len(pair) == 2
        with without_casts():
            pair = both()
    if len(pair) < 2 or pair[0].shape != pair[1].shape or pair[0].dtype not in (torch.float32, torch.float64):
        return False, False
    return bool(same_rows(pair[0], pair[1]).all()), False


def same_rows(first: Tensor, second: Tensor, precision: torch.dtype | None = None) -> Tensor:
    """Return which texts have the same output to rounding, each number beside the largest of its channel: ``[texts]``.

    Args:
        first: ``[texts, length, ...]``.
        second: the same, computed with other padding.
        precision: in which both were computed, if it is not their own.
    """
    dtype = precision or first.dtype
    wide = first.double(), second.double()
    scale = wide[1].abs().amax((0, 1))
    scale = scale.clamp(min=float(scale.median()) * LEAST_SCALE)
    step = max(PADDING_STEP, COARSE * torch.finfo(dtype).eps) if dtype.is_floating_point else 0
    return ((wide[0] - wide[1]).abs() <= step * scale).flatten(1).all(1)


def with_padding(
    batch: CachedBatch, level: Level, node: Node, value: Tensor, some: Some, outside: Outside, notices: Notices
) -> tuple[Tensor, Tensor]:
    """Compute texts once more with other padding, for their entries: with more, if longer batches came before.

    Args:
        batch: the batch.
        level: where the entries go; only texts are computed again, whose entries serve other lengths.
        node: boundary activation of the batch.
        value: their output, ``[texts, length, ...]``.
        some: the texts.
        outside: tensors of the program.
        notices: takes messages.

    Returns:
        The output with as much padding as is known to be possible, and for which texts it was the same: ``[texts]``.
    """
    every = torch.ones(len(value), dtype=torch.bool)
    if not level.form.ragged or not outside.fits(node, ragged=True):
        return value, every
    judge_length(level, outside, node, notices)
    if not level.padded.agree:
        return value, every
    length = node.meta.shape[1]
    longest = outside.room(node) if some.rows is None else min(outside.room(node), some.rows.shape[1])
    own = torch.tensor(outside.sample_lengths(node))[torch.from_numpy(some.places)]
    shorter = int(own[own < length].max()) if bool((own < length).any()) else length
    other = longest if longest > length else shorter
    if other == length:
        return value, every
    with preserved_random_state(), torch.no_grad():
        found = batch.computed_at(level, node, some, other)
    if found is None:
        return value, ~every
    same = same_rows(found[:, :length], value[:, :other], precision_of(node)).cpu() | (own > other)
    return (found if other > length else value), same


def judge_folding(front: Front, level: Level, node: Node, outside: Outside) -> None:
    """Have frozen attention computed fast where last bits differ anyway, if some rows agree to rounding.

    Args:
        front: the frozen front.
        level: whose entries serve texts that are padded to other lengths.
        node: boundary activation of a batch.
        outside: tensors of the program.
    """
    training = front.prefix.module.training
    if training in front.folds or level.padded.exact or front.device.type != "cpu":
        return
    if precision_of(node).itemsize >= node.meta.dtype.itemsize:
        return  # without autocast it is not slow
    with preserved_random_state(), torch.no_grad():
        pair = []
        for fast in (False, True):
            front.folds[training] = fast
            pair.append(outside.replayed(node, list(range(min(ROWS, node.tape.size)))))
    before, after = pair
    if before is None or after is None or Meta.of(before) != Meta.of(after):
        front.folds[training] = False
    else:
        front.folds[training] = bool(same_rows(before, after, precision_of(node)).all())
