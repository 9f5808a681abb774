"""The last loss of each sample."""

import json

import numpy as np

from lightning_egeria.methods.selecting.losses import LossTable


def test_losses_are_of_their_samples_in_any_order():
    table = LossTable(staleness=2)
    table.update([4, 1, 9], np.array([0.4, 0.1, 0.9]), epoch=0)
    table.update([1], np.array([0.2]), epoch=2)
    assert table.of([9, 1, 4]).tolist() == [0.9, 0.2, 0.4]
    assert table.stale([1, 4, 5], epoch=2).tolist() == [False, False, True]
    assert table.stale([1, 4], epoch=3).tolist() == [False, True]


def test_state_comes_back_from_plain_types():
    table, other = LossTable(1), LossTable(1)
    table.update([3, "a", (1, 2)], np.array([1.0, 2.0, 3.0]), epoch=1)
    other.load_state_dict(json.loads(json.dumps(table.state_dict())))
    assert other.of([3, "a"]).tolist() == [1.0, 2.0]
    assert other.stale([(1, 2)], 1).tolist() == [True]
