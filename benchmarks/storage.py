"""Which storage library is fastest for a cache of fixed-size activations? Random batches of entries, by integer id.

Each candidate reads batches of 128 random ids into one contiguous array, in turn with the others. Then each writes 128
entries in random order into a store just made, as in the epoch that fills a cache; none waits for the disk. Printed are
the median milliseconds per batch and, in brackets, the time over that of the first candidate, as the median of the
ratios within a round. Before, all is read and compared with what was written, which also leaves it in the page cache.

    python benchmarks/storage.py [--store-bytes 268435456] [--rounds 9] [--dir FOLDER]

At the default size it takes some 2 GiB of disk and of page cache, and 1 GiB of memory besides.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Seconds = dict[str, list[float]]

BATCH = 128
ENTRY_BYTES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)


class Store:
    """Entries with the ids 0 to ``entries - 1``, in files in ``folder``."""

    name: ClassVar[str]
    library: ClassVar[str]
    most_entries: ClassVar[int] = sys.maxsize
    in_order: ClassVar[bool] = False

    def __init__(self, folder: Path, entries: int, entry_bytes: int) -> None:
        self.folder, self.entries, self.entry_bytes = folder, entries, entry_bytes
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def write(self, ids: Ids, rows: Bytes) -> None:
        raise NotImplementedError

    def read(self, ids: Ids, out: Bytes) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """What is mapped goes with the object."""


class Pread(Store):
    name, library = "pread", "numpy"

    def open(self) -> None:
        self.file = os.open(self.folder / "entries", os.O_RDWR | os.O_CREAT)
        os.truncate(self.file, self.entries * self.entry_bytes)

    def write(self, ids: Ids, rows: Bytes) -> None:
        for i, row in zip(ids.tolist(), rows, strict=True):
            if os.pwritev(self.file, [row], i * self.entry_bytes) != self.entry_bytes:
                raise OSError(f"Entry {i} was not written whole.")

    def read(self, ids: Ids, out: Bytes) -> None:
        for i, row in zip(ids.tolist(), out, strict=True):
            if os.preadv(self.file, [row], i * self.entry_bytes) != self.entry_bytes:
                raise OSError(f"Entry {i} was not read whole.")

    def close(self) -> None:
        os.close(self.file)


class PreadXxh3(Pread):
    name, library = "pread + xxh3", "xxhash"

    def open(self) -> None:
        super().open()
        self.digest = importlib.import_module("xxhash").xxh3_64_intdigest
        self.digests: dict[int, int] = {}

    def write(self, ids: Ids, rows: Bytes) -> None:
        super().write(ids, rows)
        self.digests.update(zip(ids.tolist(), map(self.digest, rows), strict=True))

    def read(self, ids: Ids, out: Bytes) -> None:
        for i, row in zip(ids.tolist(), out, strict=True):
            # Row by row, so that a row is hashed while the processor's cache still has it.
            os.preadv(self.file, [row], i * self.entry_bytes)
            if self.digest(row) != self.digests[i]:
                raise OSError(f"Entry {i} is damaged.")


class NumpyMemmap(Store):
    name, library = "numpy.memmap", "numpy"

    def open(self) -> None:
        self.map = np.memmap(self.folder / "entries", np.uint8, "w+", shape=(self.entries, self.entry_bytes))

    def write(self, ids: Ids, rows: Bytes) -> None:
        self.map[ids] = rows

    def read(self, ids: Ids, out: Bytes) -> None:
        # In the default mode, "raise", NumPy gathers into a buffer of its own and copies that to `out`.
        np.take(self.map, ids, axis=0, out=out, mode="clip")


class TensorDict(Store):
    name, library = "MemoryMappedTensor", "tensordict"

    def open(self) -> None:
        shape, path = (self.entries, self.entry_bytes), str(self.folder / "entries")
        kind = importlib.import_module("tensordict").MemoryMappedTensor
        self.map = kind.empty(shape, dtype=torch.uint8, filename=path)

    def write(self, ids: Ids, rows: Bytes) -> None:
        self.map.index_copy_(0, torch.from_numpy(ids), torch.from_numpy(rows))

    def read(self, ids: Ids, out: Bytes) -> None:
        torch.index_select(self.map, 0, torch.from_numpy(ids), out=torch.from_numpy(out))


class Lmdb(Store):
    name, library = "LMDB", "lmdb"

    def open(self) -> None:
        # An entry of 4096 bytes takes two pages, as it has a header. No `sync`, as no other program waits for the disk.
        size = 4 * self.entries * self.entry_bytes + (64 << 20)
        lmdb = importlib.import_module("lmdb")
        self.environment = lmdb.open(str(self.folder), map_size=size, readahead=False, sync=False)

    def write(self, ids: Ids, rows: Bytes) -> None:
        with self.environment.begin(write=True) as transaction:
            for i, row in zip(ids.tolist(), rows, strict=True):
                transaction.put(i.to_bytes(8, "big"), row)

    def read(self, ids: Ids, out: Bytes) -> None:
        with self.environment.begin(buffers=True) as transaction:
            for i, row in zip(ids.tolist(), out, strict=True):
                row[:] = np.frombuffer(transaction.get(i.to_bytes(8, "big")), np.uint8)

    def close(self) -> None:
        self.environment.close()


class Zarr(Store):
    name, library = "zarr", "zarr"
    most_entries = 1024  # each is a file

    def open(self) -> None:
        shape, chunks = (self.entries, self.entry_bytes), (1, self.entry_bytes)
        plain: dict[str, Any] = {"dtype": "uint8", "compressors": None, "filters": None}
        plain["config"] = {"write_empty_chunks": True}  # or every chunk is first compared with the fill value
        self.array = importlib.import_module("zarr").create_array(self.folder, shape=shape, chunks=chunks, **plain)

    # One by one: `oindex` selects many, but by an index for each byte, which takes longer.
    def write(self, ids: Ids, rows: Bytes) -> None:
        for i, row in zip(ids.tolist(), rows, strict=True):
            self.array[i] = row

    def read(self, ids: Ids, out: Bytes) -> None:
        for i, row in zip(ids.tolist(), out, strict=True):
            row[:] = self.array[i]


class Safetensors(Store):
    name, library = "safetensors", "safetensors"
    in_order = True

    def open(self) -> None:
        self.shard = 64
        self.slices: dict[int, Any] = {}
        self.safe_open = importlib.import_module("safetensors").safe_open
        self.save_file = importlib.import_module("safetensors.numpy").save_file

    def write(self, ids: Ids, rows: Bytes) -> None:
        for start in range(0, len(ids), self.shard):
            path = self.folder / str(ids[start] // self.shard)
            self.save_file({"entries": rows[start : start + self.shard]}, path)

    def read(self, ids: Ids, out: Bytes) -> None:
        for i, row in zip(ids.tolist(), out, strict=True):
            number, place = divmod(i, self.shard)
            if number not in self.slices:
                # Not "pt": torch shares each of the copies out among its threads, and waits for them 128 times.
                self.slices[number] = self.safe_open(self.folder / str(number), "np").get_slice("entries")
            row[:] = self.slices[number][place]


def installed(kind: type[Store]) -> bool:
    try:
        importlib.import_module(kind.library)
    except ImportError as error:
        print(f"skipped: {kind.name}, as {kind.library} cannot be imported ({error})")
        return False
    return True


def draw(count: int, seed: int) -> Ids:
    """Distinct ids below ``count``; the same for every candidate that has as many."""
    return np.random.default_rng(seed).choice(count, min(BATCH, count), replace=False)


def fill_and_verify(store: Store, data: Bytes, out: Bytes) -> None:
    order = np.arange(len(data)) if store.in_order else np.random.default_rng(0).permutation(len(data))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    for ids in batches:
        store.write(ids, data[ids])
    # Or the kernel would write to the disk while candidates are timed.
    for path in store.folder.rglob("*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    for ids in batches:
        out.fill(0)  # what another candidate has read must not pass
        store.read(ids, out[: len(ids)])
        if not np.array_equal(out[: len(ids)], data[ids]):
            raise RuntimeError(f"{store.name} read other bytes than were written.")


def measure(kinds: list[type[Store]], data: Bytes, rounds: int, root: str | None) -> tuple[Seconds, Seconds]:
    """What each read and each write took, by candidate."""
    batch, entry_bytes = min(BATCH, len(data)), data.shape[1]
    counts = {kind.name: min(kind.most_entries, len(data)) for kind in kinds}
    reads: Seconds = {kind.name: [] for kind in kinds}
    writes: Seconds = {kind.name: [] for kind in kinds}
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        out: Bytes = np.zeros((batch, entry_bytes), np.uint8)
        stores: list[Store] = []
        for kind in kinds:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            stores.append(kind(folder, counts[kind.name], entry_bytes))
            fill_and_verify(stores[-1], data[: counts[kind.name]], out)
        for number in range(rounds):
            # In another order each round, so that no store always finds the caches as the same other store left them.
            for store in random.Random(number).sample(stores, len(stores)):
                ids = draw(counts[store.name], number)
                began = time.perf_counter()
                store.read(ids, out)
                reads[store.name].append(time.perf_counter() - began)
        for store in stores:
            store.close()
    for number in range(rounds):
        for kind in random.Random(number).sample(kinds, len(kinds)):
            ids = np.arange(batch) if kind.in_order else draw(counts[kind.name], number)
            rows = data[ids]
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                store = kind(Path(scratch), counts[kind.name], entry_bytes)
                began = time.perf_counter()
                store.write(ids, rows)
                writes[kind.name].append(time.perf_counter() - began)
                store.close()
    return reads, writes


def print_table(title: str, columns: dict[str, Seconds], kinds: list[type[Store]]) -> None:
    print(f"\n{title}\n\n| ms per batch | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for kind in kinds:
        cells = []
        for seconds in columns.values():
            own, first = seconds[kind.name], seconds[kinds[0].name]
            ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
            cells.append(f"{1e3 * statistics.median(own):.3f} ({ratio:.2f})")
        print(f"| {kind.name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare storage libraries for a cache of activations.")
    parser.add_argument("--store-bytes", type=int, default=256 << 20, help="the most that one store holds")
    parser.add_argument("--rounds", type=int, default=9, help="batches that each candidate reads, and writes")
    parser.add_argument("--dir", default=None, help="where the stores are; the system's temporary folder by default")
    args = parser.parse_args()
    if args.store_bytes < max(ENTRY_BYTES) or args.rounds < 1:
        parser.error(f"--store-bytes must hold an entry of {max(ENTRY_BYTES)} bytes, and --rounds be 1 at least")

    print(f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} of its threads on {os.cpu_count()} cores")
    candidates: list[type[Store]] = [Pread, PreadXxh3, NumpyMemmap, TensorDict, Lmdb, Zarr, Safetensors]
    kinds = [kind for kind in candidates if installed(kind)]
    libraries = [kind.library for kind in kinds if kind.library != "numpy"]
    print(", ".join(f"{library} {importlib.metadata.version(library)}" for library in libraries))
    print(f"{args.rounds} rounds, stores of at most {args.store_bytes / 2**20:.1f} MiB, data in the page cache")
    if Zarr in kinds:
        print(f"zarr, which keeps each entry in a file, has at most {Zarr.most_entries} of them")

    reads: dict[str, Seconds] = {}
    writes: dict[str, Seconds] = {}
    for entry_bytes in ENTRY_BYTES:
        shape = (args.store_bytes // entry_bytes, entry_bytes)
        data: Bytes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        heading = f"{min(BATCH, len(data))} of {len(data)}, {entry_bytes >> 10} KiB"
        reads[heading], writes[heading] = measure(kinds, data, args.rounds, args.dir)
    print_table("Reading", reads, kinds)
    print_table("Writing into a new store (safetensors: whole shards of 64 entries, in order)", writes, kinds)


if __name__ == "__main__":
    main()
