"""In whatever order things happen to a cache directory: what is read is what was written for that very prefix."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.manifest import ENTRIES, INDEX, LOCK, MANIFEST, Manifest
from lightning_egeria.caching.store.rows import RowForm
from lightning_egeria.caching.store.samples import encode
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.errors import StoreError
from support.caching.stored import level_of, whole_fields

ENTRY_COUNT = 4
FIELD_BYTES = 64
FORM = RowForm.of(torch.empty(1, 2, 3))
NUMBERS = st.lists(st.integers(0, ENTRY_COUNT - 1), min_size=1, max_size=ENTRY_COUNT, unique=True)
RUNS = st.integers(0, 1)


def row_of(version, number):
    """What the prefix of a version gives for a sample."""
    return torch.arange(6, dtype=torch.float32).reshape(2, 3) + 10 * number + 100 * version


def fields_of(version, number):
    return whole_fields(encode([version, number]))


class StoreMachine(RuleBasedStateMachine):
    """Two runs on one cache directory, and somebody who does things to its files.

    The prefix changes, each time to weights that the store of no other version was made with; a run may come back to
    those of an earlier one. Nothing may be read but what was written under the version that is asked for. As long as
    nobody has touched the files, all of that must be there.
    """

    @initialize(host_bytes=st.sampled_from([0, 30, 10**4]), numbers=NUMBERS)
    def begin(self, host_bytes, numbers):
        self.folder = tempfile.TemporaryDirectory()
        self.directory = CacheDirectory(Path(self.folder.name) / "cache")
        self.host_bytes = host_bytes
        self.version = self.newest = 0
        self.levels = [None, None]
        self.written = {0: set()}  # of each version: numbers of the entries that must be there
        self.left_open = []
        self.freeze(numbers)
        self.freeze(numbers)

    def teardown(self):
        if hasattr(self, "folder"):
            for level in [*self.levels, *self.left_open]:
                if level is not None:
                    level.store.close()
            self.folder.cleanup()

    def manifest(self, version):
        return Manifest(f"{version:x}", ENTRY_COUNT, FORM.row_bytes, FIELD_BYTES, "torch.float32", FORM.order, {})

    def path(self, version):
        return self.directory.path / f"{version:x}"

    def level(self, run):
        """That of a run, opened if it is not."""
        if self.levels[run] is None:
            try:
                store, room = self.directory.open(self.manifest(self.version), 0, 10**9, 0)
            except StoreError:  # somebody has spoiled what another run has open
                return None
            assert room > 0
            self.levels[run] = level_of(store, FORM, self.host_bytes)
        return self.levels[run]

    def touched(self, version):
        """Nothing is promised of its store any longer but that nothing wrong is read."""
        self.written.pop(version, None)
        for run, level in enumerate(self.levels):
            if level is not None:
                self.read(run, list(range(ENTRY_COUNT)), False)
        self.look_at(version)

    def look_at(self, version):
        """Open it anew and read all that is there."""
        try:
            store = ActivationStore(self.path(version))
        except StoreError:
            return
        for number in range(min(ENTRY_COUNT, store.manifest.entries)):
            into = store.buffer()
            shape = store.read(number, into)
            if shape is not None:
                row = row_of(version, number)
                assert shape == row.shape
                assert into[: row.nbytes].tobytes() == row.numpy().tobytes()
            assert store.read_fields(number) in (None, fields_of(version, number))
        store.close()

    # --- what runs do ---

    @rule(run=RUNS, numbers=NUMBERS)
    def record(self, run, numbers):
        level = self.level(run)
        if level is None:
            return
        rows = torch.stack([row_of(self.version, number) for number in numbers])
        fields = tuple(fields_of(self.version, number) for number in numbers)
        level.write(np.array(numbers), rows, fields)
        if level.store.exists and self.version in self.written:
            self.written[self.version] |= set(numbers)

    @rule(run=RUNS, numbers=NUMBERS, refresh=st.booleans())
    def read(self, run, numbers, refresh):
        level = self.level(run)
        if level is None:
            return
        if refresh:
            try:
                level.store.refresh()
            except StoreError:
                assert self.version not in self.written
        present = level.present(np.array(numbers))
        rows, sound, *_ = level.read(np.array(numbers), pin=False)
        found = [number for number, is_sound in zip(numbers, sound, strict=True) if is_sound]
        for number, row in zip(found, rows, strict=True):
            assert row.equal(row_of(self.version, number))
        for number, was_there in zip(numbers, present, strict=True):
            fields = level.store.read_fields(number)
            assert fields in (None, fields_of(self.version, number))
            if number in self.written.get(self.version, ()):
                assert number in found
                assert was_there or not refresh
                assert fields is not None

    @rule(numbers=NUMBERS)
    def freeze(self, numbers):
        """Freeze deeper, or unfreeze and learn: other weights."""
        self.leave()
        self.newest += 1
        self.version = self.newest
        self.written[self.version] = set()
        self.record(0, numbers)

    @rule(data=st.data())
    def same_weights_again(self, data):
        """Another run has a prefix that an earlier one had."""
        self.leave()
        self.version = data.draw(st.integers(0, self.newest))

    def leave(self):
        for run, level in enumerate(self.levels):
            if level is not None:
                level.store.close()
            self.levels[run] = None

    @rule(run=RUNS)
    def crash(self, run):
        """Nothing is closed."""
        self.left_open.append(self.levels[run])
        self.levels[run] = None

    @rule(run=RUNS, number=st.integers(0, ENTRY_COUNT - 1))
    def forget(self, run, number):
        level = self.level(run)
        if level is not None:
            level.store.forget(number)
            self.written.get(self.version, set()).discard(number)

    @rule(data=st.data())
    def remove(self, data):
        version = data.draw(st.integers(0, self.newest))
        if self.directory.remove(self.path(version)):
            if version in self.written:
                self.written[version] = set()
            assert not self.path(version).exists()

    @rule()
    def look(self):
        for summary in self.directory.summaries():
            if summary.problem is None:
                self.directory.verify(summary.folder)
        for version in range(self.newest + 1):
            self.look_at(version)

    # --- what happens to files ---

    def sound(self):
        """Versions of which something is there that nobody has touched."""
        return [version for version, numbers in self.written.items() if numbers]

    @precondition(lambda self: self.sound())
    @rule(
        data=st.data(),
        how=st.sampled_from(["flip_a_bit", "cut_off", "lose_power", "delete_a_file", "delete_all"]),
    )
    def damage(self, data, how):
        version = data.draw(st.sampled_from(self.sound()))
        getattr(self, how)(data, version)
        self.touched(version)

    def flip_a_bit(self, data, version):
        path = self.path(version) / data.draw(st.sampled_from([MANIFEST, INDEX, ENTRIES, ENTRIES]))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        self.overwrite(path, content)

    def cut_off(self, data, version):
        path = self.path(version) / data.draw(st.sampled_from([MANIFEST, INDEX, ENTRIES, ENTRIES]))
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))

    def lose_power(self, data, version):
        """The index was written, and of the entries not all."""
        content = bytearray((self.path(version) / ENTRIES).read_bytes())
        start = data.draw(st.integers(0, len(content) - 1))
        part = slice(start, start + data.draw(st.integers(1, 256)))
        content[part] = bytes(len(content[part]))
        self.overwrite(self.path(version) / ENTRIES, content)

    def delete_a_file(self, data, version):
        (self.path(version) / data.draw(st.sampled_from([MANIFEST, INDEX, ENTRIES, LOCK]))).unlink()

    def delete_all(self, data, version):
        shutil.rmtree(self.path(version))

    @precondition(lambda self: self.sound())
    @rule(data=st.data())
    def move_entries(self, data):
        """With their part of the index."""
        version = data.draw(st.sampled_from(self.sound()))
        order = data.draw(st.permutations(range(ENTRY_COUNT)))
        for name, size in ((INDEX, 4), (ENTRIES, self.manifest(version).slot_bytes)):
            content = (self.path(version) / name).read_bytes().ljust(size * ENTRY_COUNT, b"\0")
            self.overwrite(self.path(version) / name, b"".join(content[n * size :][:size] for n in order))
        self.touched(version)

    @precondition(lambda self: len(self.sound()) > 1)
    @rule(data=st.data(), names=st.sampled_from([(ENTRIES,), (INDEX,), (ENTRIES, INDEX), (MANIFEST,)]))
    def mix_up(self, data, names):
        """Files of one version in the place of those of another: a backup, say."""
        source, target = data.draw(st.permutations(self.sound()))[:2]
        for name in names:
            self.overwrite(self.path(target) / name, (self.path(source) / name).read_bytes())
        self.touched(target)

    @precondition(lambda self: len(self.sound()) > 1)
    @rule(data=st.data(), name=st.sampled_from([MANIFEST, INDEX, ENTRIES, LOCK, None]))
    def link(self, data, name):
        """A link to another version's file, or to all of it, in the place of its own."""
        source, target = data.draw(st.permutations(self.sound()))[:2]
        before = [(self.path(source) / file).read_bytes() for file in (INDEX, ENTRIES)]
        self.leave()
        if name is None:
            shutil.rmtree(self.path(target))
            self.path(target).symlink_to(self.path(source))
        else:
            (self.path(target) / name).unlink()
            (self.path(target) / name).symlink_to(self.path(source) / name)
        self.version = target
        self.touched(target)
        self.record(0, [0, 1])
        self.read(0, [0, 1], False)
        assert [(self.path(source) / file).read_bytes() for file in (INDEX, ENTRIES)] == before
        self.leave()
        if self.path(target).is_symlink():
            self.path(target).unlink()

    @staticmethod
    def overwrite(path, content):
        """In place, as far as somebody has it open."""
        with path.open("r+b") as file:
            file.truncate(0)
            file.write(content)

    @invariant()
    def files_are_private(self):
        if hasattr(self, "directory"):
            for folder in self.directory.path.iterdir():
                assert folder.lstat().st_mode & 0o077 == 0
                assert all(file.lstat().st_mode & 0o077 == 0 for file in folder.iterdir() if not file.is_symlink())


TestStores = StoreMachine.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
