"""All that the package reads from disk: bytes that it wrote, and what may come of reading others in their place.

A reader returns what came of its input. It raises only what nobody may ever see: something that is no documented error,
or `WrongError`, because a store gave what nobody wrote into it.
"""

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from lightning_egeria.caching.entries import BatchSizes, CachedValue
from lightning_egeria.caching.store.manifest import ENTRIES, INDEX, MANIFEST, Manifest, read_manifest
from lightning_egeria.caching.store.memory import MemoryTier
from lightning_egeria.caching.store.rows import RowForm
from lightning_egeria.caching.store.samples import STAMP_BYTES, Absent, Opaque, decode, encode
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.errors import CheckpointError, RecordError, StoreError
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.savings import LayerModuleSavings, Savings
from lightning_egeria.freezing.scripted import ScriptedPolicy
from lightning_egeria.freezing.slopes import SlopePolicy
from lightning_egeria.report.record import CachePoint, EvaluationPoint, MetricPoint, RunRecord, StepTimes

# What came of an input. Where there is no checksum, other content may be as sound as what was written.
EXACT, OTHER, MISS = "exact", "other", "miss"
ENTRY_COUNT = 3
ROW = (2, 3)  # of the entries, in float32
HEADER_NUMBERS = 13
CPU = torch.device("cpu")


class WrongError(Exception):
    """Reading gave something else than what was written, and said nothing."""


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of file, or of state.

    Attributes:
        name: in words.
        share: of the inputs of a campaign.
        seeds: what the package writes.
        read: has the package read other bytes in their place; returns what came of it.
        json_from: where a JSON text begins in it, behind its length; None: there is none.
        edits: share of the inputs of a campaign in which values of that text are edited, and bytes are not.
    """

    name: str
    share: float
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], str]
    json_from: int | None = None
    edits: float = 0.5


def formats(folder: Path) -> list[Format]:
    """All of them; readers write to ``folder``."""
    from fuzz.job_formats import job_formats  # which needs what is defined here

    return [
        *job_formats(folder / "jobs"),
        manifest_format(folder / ("ab" * 16)),
        store_format(folder / "store"),
        entries_format(folder / "entries"),
        forged_format(folder / "forged"),
        fields_format(),
        record_format(folder / "record"),
        policy_format(),
    ]


# --- the cache ------------------------------------------------------------------------------------------------------


def a_manifest(folder: Path) -> Manifest:
    return Manifest(
        fingerprint=folder.name,
        entries=ENTRY_COUNT,
        activation_bytes=4 * math.prod(ROW),
        field_bytes=64,
        dtype="torch.float32",
        order=(0, 1, 2),
        about={"model": "Net", "boundary": "net.2"},
    )


def row_of(number: int, version: int) -> np.ndarray:
    """The activation of one entry, as bytes."""
    return (np.arange(math.prod(ROW), dtype=np.float32) + 10 * number + 100 * version).view(np.uint8)


def fields_of(number: int, version: int) -> bytes:
    return encode([number, f"version {version}"])


def filled(folder: Path, version: int, count: int = ENTRY_COUNT) -> ActivationStore:
    """A store with some entries."""
    store = ActivationStore.create(folder, a_manifest(folder))
    for number in range(count):
        assert store.write(number, row_of(number, version), ROW, fields_of(number, version))
    return store


def judge(store: ActivationStore, version: int) -> str:
    """Read every entry of a store.

    Raises:
        WrongError: one is not what was written.
    """
    found = 0
    for number in range(ENTRY_COUNT):
        into = store.buffer()
        shape = store.read(number, into)
        row = row_of(number, version)
        if shape is not None:
            if shape != ROW or into[: row.nbytes].tobytes() != row.tobytes():
                raise WrongError(f"entry {number} has another activation")
            found += 1
        fields = store.read_fields(number)
        if fields is not None and fields != fields_of(number, version):
            raise WrongError(f"entry {number} has other fields")
    return EXACT if found == ENTRY_COUNT else MISS


def manifest_format(folder: Path) -> Format:
    folder.mkdir(mode=0o700, parents=True)
    written = a_manifest(folder)

    def read(data: bytes) -> str:
        (folder / MANIFEST).write_bytes(data)
        try:
            found = read_manifest(folder)
        except StoreError:
            return "StoreError"
        found.check()
        texts = [found.fingerprint, found.dtype, *found.about, *found.about.values()]
        if found.fingerprint != folder.name or not all(text.isprintable() for text in texts):
            raise WrongError(f"{found} is none")
        return EXACT if found == written else OTHER

    return Format("manifest.json", 0.15, (written.to_json().encode(),), read, json_from=0)


def store_format(folder: Path) -> Format:
    """One or two files of a store, which is opened anew; the first byte says which. Of two versions."""
    folder.mkdir(parents=True)
    stores = [filled(folder / name, version) for version, name in enumerate(("a", "b"))]
    names = [(MANIFEST,), (ENTRIES,), (INDEX,), (INDEX, ENTRIES)]
    seeds = [
        bytes([kind]) + b"".join((store.folder / name).read_bytes() for name in names[kind])
        for store in stores
        for kind in range(len(names))
    ]
    for store in stores:
        store.close()
    target = stores[0].folder
    sound = {name: (target / name).read_bytes() for name in (MANIFEST, ENTRIES, INDEX)}

    def read(data: bytes) -> str:
        changed = names[data[0] % len(names)] if data else (MANIFEST,)
        rest = data[1:]
        for name in changed:
            size = 4 * ENTRY_COUNT if len(changed) > 1 and name == INDEX else len(rest)
            (target / name).write_bytes(rest[:size])
            rest = rest[size:]
        try:
            store = ActivationStore(target)
        except StoreError:
            return "StoreError"
        else:
            try:
                return judge(store, 0) if store.manifest.entries == ENTRY_COUNT else MISS
            finally:
                store.close()
        finally:
            for name in changed:
                (target / name).write_bytes(sound[name])

    return Format("files of a store", 0.15, tuple(seeds), read)


def entries_format(folder: Path) -> Format:
    """Index and entries of a store that is open. Of two versions."""
    folder.mkdir(parents=True)
    stores = [filled(folder / name, version) for version, name in enumerate(("a", "b"))]
    seeds = tuple((s.folder / INDEX).read_bytes() + (s.folder / ENTRIES).read_bytes() for s in stores)
    stores[1].close()
    store, size = stores[0], 4 * ENTRY_COUNT
    files = [os.open(store.folder / name, os.O_RDWR) for name in (INDEX, ENTRIES)]

    def read(data: bytes) -> str:
        os.pwrite(files[0], data[:size].ljust(size, b"\0"), 0)
        os.ftruncate(files[1], 0)
        os.pwrite(files[1], data[size:], 0)
        store.index[:] = 0
        store.refresh()
        return judge(store, 0)

    return Format("index and entries", 0.25, seeds, read)


def forged_format(folder: Path) -> Format:
    """A header that says anything, with right checksums: by someone who knows how, not by accident.

    Whatever is taken for an activation must have the shape of one, and be what lies in the file, all of it.
    """
    folder.mkdir(parents=True)
    store = ActivationStore.create(folder / "a", a_manifest(folder / "a"))
    form = RowForm.of(torch.empty(1, *ROW))
    head = struct.Struct(f"<{HEADER_NUMBERS}Q")
    name = xxhash.xxh3_64_intdigest(store.manifest.fingerprint.encode())
    file = os.open(store.folder / ENTRIES, os.O_RDWR)
    index = os.open(store.folder / INDEX, os.O_RDWR)
    row, fields = row_of(0, 0).tobytes(), bytes(STAMP_BYTES) + fields_of(0, 0)
    numbers = (name, len(ROW), *ROW, 0, 0, 0, 0, len(row), len(fields), 0, 0, 0)

    def read(data: bytes) -> str:
        _, dimensions, *rest = head.unpack(data[: head.size].ljust(head.size, b"\0"))
        body = data[head.size :].ljust(store.manifest.field_bytes, b"\0")
        length, field_length = rest[6], rest[7]
        front = store.manifest.field_bytes
        activation, kept = body[front : front + length], body[:front][:field_length]
        digests = xxhash.xxh3_64_intdigest(activation), xxhash.xxh3_64_intdigest(kept)
        header = head.pack(name, dimensions, *rest[:8], 0, *digests)
        os.ftruncate(file, 0)
        os.pwrite(file, header + body, 0)
        os.pwrite(index, (xxhash.xxh3_64_intdigest(header) & 0xFFFFFFFF or 1).to_bytes(4, "little"), 0)
        store.index[:] = 0
        store.refresh()
        tiers = (MemoryTier(0, form, ENTRY_COUNT, CPU), MemoryTier(0, form, ENTRY_COUNT, CPU))
        known = np.zeros((ENTRY_COUNT, 2), np.uint64), np.zeros(ENTRY_COUNT, bool)
        rows, sound, *_ = CachedValue(0, form.shape, frozenset(), form, store, *tiers, *known, BatchSizes(8)).read(
            np.array([0]), pin=False
        )
        found = store.read_fields(0)
        if found is not None and found != kept:
            raise WrongError("these are not the fields")
        if not sound[0]:
            return MISS
        (got,) = rows
        if got.shape != form.shape or got.numpy().tobytes() != body[front : front + got.nbytes]:
            raise WrongError(f"{got.shape} is not what lies in the file")
        return EXACT if got.numpy().tobytes() == row else OTHER

    seed = head.pack(*numbers) + fields.ljust(store.manifest.field_bytes, b"\0") + row
    return Format("forged entry", 0.15, (seed,), read)


SAMPLES: tuple[list[Any], ...] = (
    [torch.arange(6).reshape(2, 3), 5, "text"],
    [Absent((3, 4, 4), (16, 4, 1), "float32", "0123"), torch.tensor(3)],
    [Opaque("Image"), [1, 2, 3], None, True, 1.5, float("nan")],
    [Absent((), (), "bool", ""), np.ones(2), np.float32(1.5), b"\0bytes"],
    [np.array(["ab", "c"]), np.array([b"x"]), np.array([True, False]), torch.tensor([True]), torch.empty(0, 4)],
    [torch.randn(2).to(torch.bfloat16), np.arange(3, dtype=">i2"), torch.zeros(2, dtype=torch.complex64)],
)


def fields_format() -> Format:
    """The fields of a sample. Their checksum is the store's, so that there is none here."""
    seeds = tuple(map(encode, SAMPLES))

    def read(data: bytes) -> str:
        try:
            leaves = decode(data)
        except ValueError:
            return "ValueError"
        for leaf in leaves:
            check_leaf(leaf, len(data))
        return EXACT if encode(leaves) in seeds else OTHER

    return Format("fields of a sample", 0.2, seeds, read, json_from=4)


def check_leaf(leaf: Any, size: int) -> None:
    """What was read of so many bytes can be looked at, and takes about as many.

    Raises:
        WrongError: it takes more.
    """
    if isinstance(leaf, torch.Tensor):
        taken = leaf.untyped_storage().nbytes()
        leaf.reshape(-1)[:1].tolist()
    elif isinstance(leaf, np.ndarray):
        taken = leaf.nbytes
        leaf.reshape(-1)[:1].tolist()
    elif isinstance(leaf, list):
        taken = len(leaf)
    else:
        taken = 0
    if taken > max(size, 4 * 10**5):  # of the longest text that stands in an array
        raise WrongError(f"{taken} bytes of {size}")


# --- the record of a run --------------------------------------------------------------------------------------------


def a_record() -> RunRecord:
    return RunRecord(
        "run",
        {"torch": "2"},
        ["a", "b"],
        [{"step": 3, "kind": "freeze", "depth": 1, "reason": "calm"}],
        [EvaluationPoint(2, [0.5, None], [None, None]), EvaluationPoint(4, [0.25, 1e-3], [0.1, -0.1])],
        [StepTimes(step, 1, step // 3, 0.1, 0.2, 0.3, 0.0, 0.1) for step in range(1, 5)],
        [MetricPoint(2, 1.5, {"val/acc": 0.5})],
        [CachePoint(2, 1, 2, 3, 4)],
        Savings((LayerModuleSavings("a", 3, 0.5),), 1, 0.2, 0.1, 0.5, 1.0, 9, 0, 1, "float32", 100, 200),
    )


def record_format(folder: Path) -> Format:
    folder.mkdir(parents=True)
    path, written = folder / "egeria.json", a_record()
    written.write(path)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        try:
            found = RunRecord.read(path)
        except RecordError:
            return "RecordError"
        use(found)
        return EXACT if found == written else OTHER

    return Format("record of a run", 0.05, (path.read_bytes(),), read, json_from=0)


def use(record: RunRecord) -> None:
    """What the pictures and the page rest on."""
    for times in record.steps:
        record.typical_times(times.depth)
    record.name.encode()
    f"{float(record.savings.seconds_saved or 0) if record.savings is not None else 0.0:.1f}"
    [(int(event["step"]), int(event["depth"]), event["kind"] + event["reason"]) for event in record.events]
    [float(value) for point in record.metrics for value in (point.seconds, *point.values.values())]
    [abs(value) for point in record.evaluations for value in (*point.plasticity, *point.slopes) if value]


# --- the state of the policies, in a checkpoint ----------------------------------------------------------------------

MAX_DEPTH = 3


def policies() -> dict[str, Policy]:
    """New ones."""
    made: dict[str, Policy] = {
        "freezing": FreezingPolicy(patience=2),
        "pretrained": FreezingPolicy(patience=2, pretrained=True, trial=False),
        "slopes": SlopePolicy(window_evaluations=2, patience=2, bootstrap=False),
        "scripted": ScriptedPolicy({3: 1, 5: 2}),
    }
    for policy in made.values():
        policy.start(MAX_DEPTH)
    return made


def policy_format() -> Format:
    table = [[8.0, 4.0, 2.0, 1.0], [4.0, 4.0, 2.0, 1.0], [2.0, 4.0, 2.0, 1.0], [1e-4, 4.0, 2.0, 1.0]]
    trained, states = policies(), []
    for step, row in enumerate(table):
        for name, policy in trained.items():
            policy.observe(step, row, 0.1, 1.0)
            if step in (0, 3):
                states.append((name, policy.state_dict()))
    seeds = tuple(json.dumps(state).encode() for state in states)

    def read(data: bytes) -> str:
        try:
            name, state = json.loads(data)
            policy = policies()[name]
        except (ValueError, TypeError, KeyError, RecursionError):
            return "no state"
        try:
            policy.load_state_dict(state)
        except CheckpointError:
            return "CheckpointError"
        exact = repr(policy.state_dict()) in [repr(known) for _, known in states]
        for step, row in enumerate(table * 3):
            decision = policy.observe(step, row, 0.01 if step == 9 else 0.1, 1.0)
            if decision is not None and not 0 <= decision.depth <= MAX_DEPTH:
                raise WrongError(f"depth {decision.depth}")
        return EXACT if exact else OTHER

    # A text only here: a checkpoint holds objects.
    return Format("state of a policy", 0.05, seeds, read, json_from=0, edits=1.0)
