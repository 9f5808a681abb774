"""What is written, and when it ends."""

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from stored import new_level, whole_fields

from lightning_egeria.caching.recording import Budget, Limits, Recording, bytes_on_disk
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.stores.rows import RowForm

ROWS = torch.arange(12.0).view(3, 4)


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
