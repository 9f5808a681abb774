"""Chosen samples become a batch."""

import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.errors import RowsError
from lightning_egeria.methods.selecting.collating import Collated
from lightning_egeria.methods.selecting.joining import Joining

SIDE = types.SimpleNamespace(has_batch_hooks=False, moved=lambda batch: batch)


def lengths_of(samples):
    return torch.nn.utils.rnn.pad_sequence([torch.full((one,), one) for one in samples], batch_first=True)


def joining_of(**options):
    return Joining(
        DataLoader([3, 1, 2, 5], 2, collate_fn=lengths_of), SIDE, **{"in_queue": True, "in_order": False} | options
    )


def piece(joining, samples, rows, collated=True):
    batch = lengths_of(samples)
    kept = Collated(batch, samples, True) if collated else None
    moved = batch, RandomState.current()
    return joining.piece(0, batch, moved, None, len(samples), np.array(rows), RandomState.current(), kept)


def test_padded_samples_are_collated_anew():
    joining = joining_of()
    batch = joining.batch_of([piece(joining, [3, 1, 5], [0, 1]), piece(joining, [2, 2], [0])]).batch
    assert batch.equal(lengths_of([3, 1, 2]))


def test_rows_of_one_shape_are_joined():
    joining = joining_of()
    pieces = [piece(joining, [3, 1], [0], collated=False), piece(joining, [2, 3], [1, 0], collated=False)]
    assert joining.batch_of(pieces).batch.tolist() == [[3, 3, 3], [3, 3, 3], [2, 2, 0]]


def test_samples_are_kept_once_they_have_several_shapes():
    loader = DataLoader([3, 1, 3, 2, 5, 1, 5, 5], 2, collate_fn=lengths_of)
    joining, kept = Joining(loader, SIDE, in_queue=True, in_order=False), []
    for collated, ids in joining.source:
        kept.append(collated.samples)
        joining.check(collated.batch, len(ids), collated)
    assert kept == [None, None, None, [5, 5]]


def test_other_shapes_are_refused_without_the_samples():
    joining = joining_of()
    joining.check(lengths_of([3, 1]), 2, None)
    with pytest.raises(RowsError, match="cannot be joined"):
        joining.check(lengths_of([2, 1]), 2, None)
    joining_of(in_queue=False).check(lengths_of([2, 1]), 2, None)
