"""Cached values: which batches entries serve, what is written, and what is removed."""

import hashlib

import numpy as np
import pytest
import torch

from lightning_egeria.caching.entries import AGREEING, BatchSizes, CachedValues, Origin
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.limits import Budget, Limits
from lightning_egeria.caching.store.samples import stamp_of
from lightning_egeria.core.training.notices import Notices

CPU = torch.device("cpu")
SAMPLES = 12
ROWS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
ENTRIES = np.arange(SAMPLES)
FIELDS = [b"sample %d" % number for number in range(SAMPLES)]
MADE = np.arange(SAMPLES).astype(np.uint64)


def origin(paths=("a",), **known):
    options = {"loader": "training", "data": list, "samples": SAMPLES, "structure": (None, None), "views": 0, "seed": 0}
    options |= {"run": "", "computation": "a row", "batch_size": 4, "model": torch.nn.Linear}
    options |= {"paths": tuple(paths), "weights": b"0", "device": CPU}
    return Origin(**options | known)


@pytest.fixture
def make(tmp_path):
    """Makes cached values in one directory, and closes them."""
    made = []

    def values(max_bytes=10**9, min_free_bytes=0, host_bytes=0):
        folder = CacheDirectory(tmp_path / "cache")
        limits = Limits(max_bytes, min_free_bytes, Budget(host_bytes), 0, None)
        stats = CacheStats()
        made.append(CachedValues(folder, limits, stats, Notices("cache"), lambda: None))
        made[-1].folder, made[-1].stats = folder.path, stats
        return made[-1]

    yield values
    for one in made:
        one.close(remove=True)


def opened(values, paths=("a",), key=0, **known):
    values.open(origin(paths, **known), ROWS, 64, key, BatchSizes(4))
    return values.all[-1]


def record(values, value, places=ENTRIES, rows=ROWS, fields=FIELDS, lazy=(False,) * SAMPLES):
    values.recording.write(
        values.all,
        value,
        places,
        rows[places],
        [fields[at] for at in places],
        [lazy[at] for at in places],
        MADE[places],
    )
    values.recording.finish()


class TestBatchSizes:
    def test_the_size_of_the_first_batch_is_proven(self):
        sizes = BatchSizes(8)
        assert (sizes.verdict(8), sizes.verdict(7)) == (True, None)

    @pytest.mark.parametrize("size", [1, 3, 5, 7])
    def test_another_is_used_once_so_many_rows_agreed(self, size):
        sizes, agreed = BatchSizes(4), 0
        while sizes.verdict(size) is None:
            assert agreed < AGREEING
            agreed += size
            assert sizes.compared(size, same=True) is (agreed >= AGREEING or None)
        assert sizes.verdict(size) is True

    def test_one_that_differs_never_is(self):
        sizes = BatchSizes(8)
        sizes.compared(3, same=True)
        assert sizes.compared(3, same=False) is False
        assert (sizes.verdict(3), sizes.verdict(8)) == (False, True)


class TestEntries:
    def test_what_was_written_is_read(self, make):
        values = make()
        value = opened(values)
        record(values, value)
        found = value.read(np.array([7, 2]), pin=False)
        assert found.rows.equal(ROWS[[7, 2]])
        assert found.sound.all()
        assert found.stamps.tolist() == [[stamp_of(FIELDS[at]), at] for at in (7, 2)]
        assert values.stats.written == SAMPLES

    def test_an_entry_is_written_once(self, make):
        values = make()
        value = opened(values)
        record(values, value)
        record(values, value, rows=ROWS + 1)
        assert value.read(ENTRIES, pin=False).rows.equal(ROWS)
        assert values.stats.written == SAMPLES

    def test_a_sample_that_cannot_be_encoded_has_none(self, make):
        values = make()
        value = opened(values)
        record(values, value, fields=[None if at == 5 else one for at, one in enumerate(FIELDS)])
        assert np.flatnonzero(~value.present(ENTRIES)).tolist() == [5]

    def test_a_sample_that_was_left_out_has_the_fields_of_its_other_entry(self, make):
        values = make()
        first, second = opened(values), opened(values, ("a", "b"), key=1, computation="another row")
        record(values, first)
        record(values, second, fields=[None] * SAMPLES, lazy=(True,) * SAMPLES)
        assert second.present(ENTRIES).all()
        assert second.read(ENTRIES, pin=False).stamps.tolist() == first.read(ENTRIES, pin=False).stamps.tolist()

    def test_a_damaged_entry_is_a_miss(self, make):
        values = make()
        value = opened(values)
        record(values, value)
        (path,) = value.store.folder.glob("entries*")
        raw = bytearray(path.read_bytes())
        at = raw.index(ROWS[3].numpy().tobytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        found = value.read(ENTRIES, pin=False)
        assert np.flatnonzero(~found.sound).tolist() == [3]
        assert found.rows.equal(ROWS[ENTRIES != 3])
        assert not value.present(np.array([3])).any()

    def test_a_forgotten_entry_is_gone_from_disk_and_memory(self, make):
        values = make(host_bytes=10**6)
        value = opened(values)
        record(values, value)
        assert value.host.holds(ENTRIES).all()
        values.forget(value, np.array([1, 4]))
        assert np.flatnonzero(~value.present(ENTRIES)).tolist() == [1, 4]
        assert np.flatnonzero(~value.host.holds(ENTRIES)).tolist() == [1, 4]
        record(values, value, np.array([1]), ROWS + 1)
        assert value.read(np.array([1]), pin=False).rows.equal(ROWS[1:2] + 1)

    def test_after_a_doubt_entries_are_compared_again(self, make):
        values = make()
        value = opened(values)
        record(values, value)
        assert value.verified.all()
        values.forget_verified(np.array([2, 3]), views=0)
        assert np.flatnonzero(~value.verified).tolist() == [2, 3]
        value.verify(2, doubts=0)  # it was loaded before the doubt
        assert not value.verified[2]
        value.verify(2, doubts=values.doubts)
        assert value.verified[2]

    def test_each_view_of_a_sample_is_doubted(self, make):
        values = make()
        value = opened(values, views=2)
        value.verified[:] = True
        values.forget_verified(np.array([1]), views=2)
        assert np.flatnonzero(~value.verified).tolist() == [2, 3]


class TestRoom:
    def test_writing_ends_at_max_bytes(self, make):
        values = make(max_bytes=0)
        value = opened(values)
        with pytest.warns(UserWarning, match="max_bytes=0 is reached. 0 of 12 entries stay in use"):
            record(values, value)
        assert not values.recording.active
        assert not value.present(ENTRIES).any()

    def test_writing_ends_before_the_disk_is_full(self, make):
        values = make(min_free_bytes=10**18)
        value = opened(values)
        with pytest.warns(UserWarning, match="would be left on the disk"):
            record(values, value)

    def test_another_value_is_tried(self, make):
        values = make(max_bytes=0)
        with pytest.warns(UserWarning, match="max_bytes"):
            record(values, opened(values))
        opened(values, key=1, computation="another row")
        assert values.recording.active

    def test_host_memory_is_shared_and_given_back(self, make):
        values = make(host_bytes=SAMPLES * 16 + 32)
        first = opened(values)
        second = opened(values, key=1, computation="another row")
        assert (first.host.capacity, second.host.capacity) == (SAMPLES, 2)
        values.drop([first])
        assert opened(values, key=2, computation="a third row").host.capacity == SAMPLES


class TestValues:
    def test_a_value_is_found_by_its_key_and_shape(self, make):
        values = make()
        value = opened(values, key=7)
        assert values.of(7, (4,)) is value
        assert values.of(7, (5,)) is values.of(8, (4,)) is None
        assert (values.has(7), values.has(8)) == (True, False)
        assert values.in_folder(value.store.folder) is value

    def test_a_dropped_value_is_removed_from_disk(self, make):
        values = make()
        first, second = opened(values), opened(values, key=1, computation="another row")
        values.drop([first])
        assert [*values] == [second]
        assert not values.has(0)
        assert [*values.folder.iterdir()] == [second.store.folder]
        values.drop()
        assert len(values) == 0
        assert [*values.folder.iterdir()] == []

    def test_what_a_whole_epoch_did_not_ask_for_is_dropped(self, make):
        values = make()
        first, second = opened(values), opened(values, ("a", "b"), key=1, computation="another row")
        values.begin_epoch(1)
        assert [*values] == [first, second]
        second.asked = 1
        assert values.is_superseded(first)
        assert not values.is_superseded(second)
        values.begin_epoch(2)
        assert [*values] == [second]

    def test_a_value_behind_another_is_nested(self, make):
        values = make()
        first = opened(values)
        assert not values.are_nested
        second = opened(values, ("a", "b"), key=1, computation="another row")
        assert values.are_nested
        record(values, first, np.array([3, 4]))
        assert values.older_has(second, np.array([2, 3, 4])).tolist() == [False, True, True]
        assert not values.older_has(first, ENTRIES).any()

    @pytest.mark.parametrize("remove", [False, True])
    def test_stores_stay_or_go_at_the_end(self, make, remove):
        values = make()
        record(values, opened(values))
        values.close(remove)
        values.close(remove)
        assert len([*values.folder.iterdir()]) == (not remove)

    def test_another_run_finds_entries_of_the_same_origin_only(self, make):
        values = make()
        record(values, opened(values))
        values.close(remove=False)
        later = make()
        assert opened(later).present(ENTRIES).all()
        assert not later.all[0].verified.any()
        others = [{"weights": b"1"}, {"batch_size": 5}, {"computation": "other"}, {"samples": 13}, {"data": tuple}]
        others += [{"views": 2}, {"run": hashlib.sha1(b"1").hexdigest()}, {"structure": None}]
        for number, other in enumerate(others):
            value = opened(later, key=number + 1, **other)
            assert not value.present(np.arange(len(value.verified))).any(), other


def test_modules_are_named_in_the_order_of_the_network():
    assert origin(("b", "a")).modules == "'b', 'a'"
    assert origin(("d", "a", "c", "b")).modules == "'d' to 'b'"
