"""Batches of one boundary in and out of a store and of memory."""

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from stored import level_of, new_level, whole_fields, write

from lightning_egeria.caching.levels import Lengths, Recording, bytes_on_disk
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.stores.limits import Budget, Limits
from lightning_egeria.stores.rows import RowForm
from lightning_egeria.stores.samples import stamps_of
from lightning_egeria.stores.store import ActivationStore

ROWS = torch.arange(12.0).view(3, 4)
BATCHES = {
    "vectors": torch.randn(4, 6),
    "channels last": torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last),
    "numbers": torch.randn(4),
    "bfloat16": torch.randn(4, 2).to(torch.bfloat16),
    "transposed": torch.randn(4, 5, 6).transpose(1, 2),
    "empty": torch.randn(4, 0),
}


@pytest.fixture
def level(tmp_path):
    opened = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 4)))
    yield opened
    opened.store.close()


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("host_bytes", [0, 100, 10**6])
def test_rows_come_back_with_their_strides(tmp_path, batch, host_bytes):
    form = RowForm.of(batch)
    level = new_level(tmp_path / "store", form, host_bytes=host_bytes)
    entries = np.array([7, 2, 9, 4])
    assert level.write(entries, form.to_memory(batch), (whole_fields(b""),) * 4) == 4
    for _ in range(2):
        rows, sound, *_ = level.read(entries[::-1].copy(), pin=False)
        back = form.from_memory(rows)
        assert sound.all()
        assert back.equal(batch.flip(0))
        assert back.stride() == batch.stride()
    assert level.present(np.arange(10)).tolist() == [n in entries for n in range(10)]
    level.store.close()


def test_missing_entries_are_left_out(level):
    write(level, [3, 5], torch.arange(8.0).view(2, 4))
    rows, sound, *_ = level.read(np.array([5, 1, 3]), pin=False)
    assert sound.tolist() == [True, False, True]
    assert rows[:, 0].tolist() == [4, 0]


def test_entry_is_written_once(level):
    assert write(level, [1], torch.zeros(1, 4)) == 1
    assert write(level, [1, 2], torch.ones(2, 4)) == 1
    assert level.read(np.array([1, 2]), pin=False)[0][:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("host_bytes", [0, 10**6])
def test_forgotten_entries_are_misses(tmp_path, host_bytes):
    level = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 4)), host_bytes=host_bytes)
    write(level, [1, 2], torch.zeros(2, 4))
    level.forget(np.array([1]))
    assert level.read(np.array([1, 2]), pin=False)[1].tolist() == [False, True]
    assert level.verified[[1, 2]].tolist() == [False, True]
    level.store.close()


def test_verified_entry_that_another_run_rewrote_is_a_miss(level):
    """It stands for another sample now."""
    write(level, [1], torch.zeros(1, 4), b"one")
    other = level_of(ActivationStore(level.store.folder), level.form)
    other.forget(np.array([1]))
    write(other, [1], torch.ones(1, 4), b"two")
    level.store.refresh()
    assert level.read(np.array([1]), pin=False)[1].tolist() == [False]
    other.store.close()


def test_stamps_are_known_after_reading(level):
    write(level, [1], torch.zeros(1, 4), b"one")
    other = level_of(ActivationStore(level.store.folder), level.form)
    assert not other.stamps.any()
    other.read(np.array([1]), pin=False)
    assert other.stamps[1].tolist() == level.stamps[1].tolist() == list(stamps_of(whole_fields(b"one")))
    assert not other.verified.any()
    other.store.close()


def test_a_million_entries_take_little_memory(tmp_path):
    entries = 10**6
    level = new_level(tmp_path / "store", RowForm.of(torch.empty(1, 64)), entries, host_bytes=10**5)
    taken = level.store.index.nbytes + level.host.index_bytes + level.stamps.nbytes + level.verified.nbytes
    assert taken < 32 * entries
    assert sum(file.stat().st_blocks for file in level.store.folder.iterdir()) * 512 < 10**6  # sparse
    level.store.close()


def test_entries_serve_shorter_batches_once_lengths_agree():
    lengths, own = Lengths(), np.array([10, 20, 30], np.int32)
    assert lengths.serves(own, 20).tolist() == [False, True, False]
    lengths.judged(20, same=True, exact=False)
    assert lengths.serves(own, 20).tolist() == [False, True, True]
    assert not lengths.exact
    assert not lengths.is_new(20)
    assert lengths.is_new(30)
    lengths.judged(30, same=False, exact=False)
    lengths.judged(40, same=True, exact=True)
    assert lengths.agree is False
    assert not lengths.is_new(50)
    assert lengths.serves(own, 20).tolist() == [False, True, False]


class Recorder:
    """A recording into the levels of a folder."""

    def __init__(self, folder, levels=1, **limits):
        room = {"max_bytes": 10**9, "min_free_bytes": 0, "host": Budget(0), "device_bytes": 0} | limits
        self.told, self.stats = [], CacheStats()
        self.recording = Recording(Limits(**room), self.stats, lambda text, cause: self.told.append(text))
        form = RowForm.of(ROWS)
        self.levels = [new_level(folder / f"{number}", form) for number in range(levels)]

    def write(self, numbers, rows=ROWS, fields=(b"a", b"b", b"c"), lazy=(False,) * 3, made=(0, 0, 0)):
        made = np.array(made, np.uint64)
        self.recording.write(self.levels, np.array(numbers), rows, fields, lazy, made)
        self.recording.finish()

    @property
    def present(self):
        return np.flatnonzero(self.levels[-1].store.index).tolist()

    def close(self):
        self.recording.close()
        for level in self.levels:
            level.store.close()


@pytest.fixture
def recorder(tmp_path):
    made = []

    def make(**options):
        made.append(Recorder(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_rows_are_written_with_their_fields(recorder):
    one = recorder()
    one.write([4, 1, 7], made=(0, 5, 0))
    rows, sound, *_ = one.levels[0].read(np.array([1, 4]), pin=False)
    assert sound.all()
    assert rows.data.equal(ROWS[[1, 0]])
    assert one.levels[0].store.read_fields(1) == whole_fields(b"b", made=5)
    assert (one.stats.to_write, one.stats.written, one.told) == (3, 3, [])


def test_entries_that_are_there_are_not_written_again(recorder):
    one = recorder()
    one.write([4, 1, 7])
    one.write([4, 2, 7])
    assert one.present == [1, 2, 4, 7]
    assert one.stats.written == 4


def test_samples_without_fields_are_not_written(recorder):
    one = recorder()
    one.write([4, 1, 7], fields=(b"a", None, b"c"))
    assert one.present == [4, 7]


def test_rows_of_another_form_are_not_written(recorder):
    one = recorder()
    one.write([4, 1, 7], torch.zeros(3, 5))
    assert one.present == []


def test_fields_of_lazy_samples_come_from_the_older_level(recorder):
    one = recorder(levels=2)
    newest = one.levels.pop()
    one.write([4, 1, 7])
    one.levels.append(newest)
    one.write([4, 1, 8], fields=(None,) * 3, lazy=(True,) * 3)
    assert one.present == [1, 4]
    assert newest.store.read_fields(1) == whole_fields(b"b")


def test_recording_ends_at_max_bytes(recorder):
    one = recorder(max_bytes=20_000)
    for start in range(0, 9, 3):
        one.recording.restart(others=8000 * start // 3)
        one.write([start, start + 1, start + 2])
    assert not one.recording.active
    assert 0 < len(one.present) < 9
    (told,) = one.told
    assert f"max_bytes=20000 is reached. {len(one.present)} of 10 entries stay in use" in told


def test_stores_of_other_runs_count(recorder):
    one = recorder(max_bytes=20_000)
    one.recording.restart(others=19_999)
    one.write([1, 2, 3])
    assert one.present == []


def test_recording_keeps_the_disk_free(recorder, tmp_path):
    one = recorder(min_free_bytes=shutil.disk_usage(tmp_path).total)
    one.write([1, 2, 3])
    assert one.present == []
    assert "would be left on the disk" in one.told[0]


def test_full_disk_ends_the_recording(recorder, monkeypatch):
    one, error = recorder(), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(error))
    one.write([1, 2, 3])
    one.write([4, 5, 6])
    assert not one.recording.active
    assert "failed: No space left on device. 0 of 10 entries stay in use" in one.told[0]


def test_removed_folder_ends_the_recording(recorder, tmp_path):
    one = recorder()
    one.write([1, 2, 3])
    shutil.rmtree(tmp_path / "0")
    one.write([4, 5, 6])
    assert "is gone. 3 of 10 entries stay in use" in one.told[0]
    assert one.levels[0].read(np.array([1]), pin=False)[1].all()


def test_recording_begins_anew_with_another_level(recorder):
    one = recorder(max_bytes=0)
    one.write([1, 2, 3])
    assert not one.recording.active
    one.recording.restart(others=0)
    assert one.recording.active


def test_bytes_on_disk_are_those_of_all_levels(recorder):
    one = recorder(levels=2)
    one.write([1, 2, 3])
    assert bytes_on_disk(one.levels) == sum(level.store.disk_bytes for level in one.levels) > 0
    assert bytes_on_disk([]) == 0
