"""One batch under the cache."""

import pytest
import torch
from lazies import is_lazy
from programs.parts import vectors
from streams import Drive

from lightning_egeria.caching.batch import CachedBatch
from lightning_egeria.lazy.tensors import plain

IDS = [3, 1, 8, 20, 5, 11]
X = vectors()[IDS][0]


@pytest.fixture
def drive(tmp_path):
    """Everything is recorded."""
    made = Drive(tmp_path)
    for _ in range(2):
        made.epoch()
        made.settle()
    made.data.loaded.clear()
    yield made
    made.close()


def last(drive):
    return drive.batches[-1]


def test_hits_are_counted_by_sample(drive):
    drive.batch(IDS)
    batch = last(drive)
    assert (batch.samples, batch.hits, batch.advanced, batch.calls) == (6, 6, 0, 1)
    assert batch.lazy == (True,) * 6
    assert batch.ended > batch.began


def test_the_time_of_a_miss_includes_its_computation(tmp_path, monkeypatch):
    """It is compared with that of hits, to tell whether the cache pays."""
    seen, boundary = [], CachedBatch.boundary

    def noted(batch, depth, node):
        output = boundary(batch, depth, node)
        seen.append((batch.eager, output is None, batch.ended is None))
        return output

    monkeypatch.setattr(CachedBatch, "boundary", noted)
    drive = Drive(tmp_path)
    drive.epoch()
    assert (False, True, True) in seen
    assert (False, True, False) not in seen
    assert all(batch.ended > batch.began for batch in drive.batches)
    drive.close()


def test_touch_is_told_with_its_place(drive):
    def step(net, x, y):
        return net(x) + float(x.mean())  # this line

    drive.batch(IDS, step)
    line = step.__code__.co_firstlineno + 1
    assert last(drive).was_touched == f"step (test_batch.py:{line})"
    assert sorted(drive.data.loaded) == sorted(IDS)


def test_batch_that_is_not_read_is_not_touched(drive):
    drive.batch(IDS)
    assert last(drive).was_touched is None


def test_lazy_input_can_be_read_after_the_batch(drive):
    kept = []
    drive.batch(IDS, lambda net, x, y: kept.append(x) or net(x))
    assert is_lazy(kept[0])
    assert kept[0].mean().equal(X.mean())


def test_inner_activation_is_computed_at_the_end(drive):
    """The weights may be others by then."""
    kept = []
    drive.batch(IDS, lambda net, x, y: net.b(kept.append(net.a(x)) or kept[0]))
    assert kept[0].is_known
    assert plain(kept[0]).equal(drive.plain.a(X))


def test_each_call_returns_a_tensor_of_its_own(drive):
    def step(net, x, y):
        first = net.b(net.a(x))
        first.zero_()
        return net.b(net.a(x))

    expected = drive.plain.b(drive.plain.a(X))
    for _ in range(2):
        assert drive.batch(IDS, step).equal(expected)
    assert last(drive).calls == 2
    assert last(drive).hits == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.flip(0),
        lambda x: x + torch.arange(6.0)[:, None],
        lambda x: x[:3],
        lambda x: torch.cat([x, x]),
    ],
    ids=["sum", "in place", "order", "outside", "some rows", "twice"],
)
def test_other_inputs_are_not_served(drive, change):
    output = drive.batch(IDS, lambda net, x, y: net(change(x)))
    assert output.equal(drive.plain(change(X.clone())))
    assert last(drive).hits == 0


def test_entries_stand_for_what_the_program_added(tmp_path):
    """A tensor of the program is part of the stamp of an entry."""
    drive = Drive(tmp_path)
    for shift in (1.0, 1.0, 2.0):
        scale = torch.full((6, 1), shift)
        for start in range(0, 24, 6):
            ids = list(range(start, start + 6))
            output = drive.batch(ids, lambda net, x, y, scale=scale: net(x * scale))
            assert output.equal(drive.plain(vectors()[ids][0] * shift))
        drive.settle()
    hits = [batch.hits for batch in drive.batches]
    assert hits == [0] * 4 + [6] * 4 + [0] * 4
    drive.close()


def test_changed_front_is_not_served(drive):
    with torch.no_grad():
        for net in (drive.net, drive.plain):
            net.a[0].weight.mul_(2)
    assert drive.batch(IDS).equal(drive.plain(X))
    assert last(drive).hits == 0


def test_rows_in_another_order_than_planned(drive):
    """A collate function sorts."""
    drive.planned.collate = lambda samples: torch.utils.data.default_collate(sorted(samples, key=lambda s: int(s[1])))
    order = sorted(IDS, key=lambda index: int(vectors()[index][1]))
    assert drive.batch(IDS).equal(drive.plain(vectors()[order][0]))
    assert last(drive).hits == 6
