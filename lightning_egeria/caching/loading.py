"""Loading a batch as planned, where the user's DataLoader loads it: in its worker processes or in this one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate, default_collate_fn_map

from lightning_egeria.caching.plan import Kept, Loaded, Mode, Plan
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.meta import Meta
from lightning_egeria.caching.record.sending import SentRows, send
from lightning_egeria.caching.record.tape import Node, Tape
from lightning_egeria.caching.record.tensors import LazyTensor, show, stack
from lightning_egeria.caching.store.samples import (
    STAMP_BYTES,
    Absent,
    FieldMemory,
    copied,
    encode,
    leaves_of,
    with_descriptions,
    with_leaves,
)
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.core.batches.worker_calls import answer_calls, this_worker
from lightning_egeria.core.snapshots.contents import Contents, changed
from lightning_egeria.core.snapshots.digests import has_values
from lightning_egeria.core.snapshots.random_state import RandomState, preserved_random_state
from lightning_egeria.errors import StoreError


def _collate(batch: list[Any], *, collate_fn_map: Any = None) -> Any:
    """What torch's own collate function does with tensors, for lazy ones and for their nodes."""
    users = default_collate_fn_map[Tensor]
    if users is not collate_tensor_fn:
        return users([show(one) if isinstance(one, Node) else one for one in batch], collate_fn_map=collate_fn_map)
    # Torch's takes shared memory in a worker, for values that are not there.
    return stack(batch) if isinstance(batch[0], Node) else torch.stack(batch, 0)


_GENERATOR = "a global random generator"


@contextlib.contextmanager
def _knows_lazy_tensors() -> Iterator[None]:
    """Have torch's own collate function, which the user's may call, stack lazy tensors."""
    default_collate_fn_map[LazyTensor] = default_collate_fn_map[Node] = _collate
    try:
        yield
    finally:
        del default_collate_fn_map[LazyTensor], default_collate_fn_map[Node]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A leaf of all samples, collated; it stands for the leaf of one sample."""

    values: Any


def _values_of(batch: list[_Column], *, collate_fn_map: Any = None) -> Any:
    (column,) = batch
    return column.values


class PlannedDataset:
    """The user's dataset and collate function, asked for planned batches.

    Args:
        dataset: the user's map-style dataset.
        collate: collate function of the user's DataLoader.

    Attributes:
        collate_plain: the same for batches without the cache, where it may be watched.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = self.collate_plain = collate
        self._stores: dict[Path, ActivationStore | None] = {}
        self._memory = FieldMemory()
        self._moving: Contents | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stores": {}, "_memory": FieldMemory(), "_moving": None}

    def __getitems__(self, plan: Plan) -> Loaded:
        """Load a batch."""
        started = time.perf_counter()
        loaded = self._load(plan)
        loaded.took = time.perf_counter() - started
        return loaded

    def _load(self, plan: Plan) -> Loaded:
        if plan.mode is Mode.PLAIN:
            return Loaded(self.collate_plain(self.fetch(plan.ids, plan.seeds)), plan)
        size = len(plan.ids)
        stored = self._stored(plan)
        if len(stored) == size and not plan.keeps and (columns := self._by_columns(plan, stored)) is not None:
            return Loaded(columns, plan, (True,) * size, (None,) * size, (this_worker(),) * size, plan.structure)
        stored = {position: [copied(leaf) for leaf in leaves] for position, leaves in stored.items()}
        missing = [position for position in range(size) if position not in stored]
        loaded, drew, seconds = self._watched(plan, missing) if missing else ([], None, 0.0)
        if drew is None and not self._come_alone(plan, missing, loaded):
            whole = loaded if len(missing) == size else self.fetch(plan.ids, plan.seeds)
            return Loaded(self.collate_plain(whole), dataclasses.replace(plan, mode=Mode.PLAIN), together=True)
        structures = [plan.structure] * bool(stored) + [with_leaves(one, itertools.repeat(None)) for one in loaded]
        if any(repr(one) != repr(structures[0]) for one in structures):
            rest = iter(self.fetch([plan.ids[position] for position in stored], _some(plan.seeds, stored)))
            new = iter(loaded)
            both = [next(rest) if position in stored else next(new) for position in range(size)]
            plain = dataclasses.replace(plan, mode=Mode.PLAIN)
            return Loaded(self.collate_plain(both), plain, drew=drew, differ=True)
        samples = Kept(dict(zip(missing, loaded, strict=True)), stored)
        kept = samples if plan.keeps else None
        found = self.batch_of(plan, copy.deepcopy(samples) if kept is not None else samples)
        found.structure, found.drew, found.kept, found.loading = structures[0], drew, kept, seconds
        found.varies = drew == _GENERATOR and plan.mode is Mode.PROBE and self._vary(plan, found.fields)
        return found

    def _vary(self, plan: Plan, fields: Sequence[bytes | None]) -> bool:
        """Whether most samples of a batch are others if they are loaded again."""
        with preserved_random_state():
            again = map(_fields_of, self.fetch(plan.ids, plan.seeds))
            return 2 * sum(one != other for one, other in zip(fields, again, strict=True)) > len(fields)

    def _by_columns(self, plan: Plan, stored: dict[int, list[Any]]) -> Any:
        """What torch's own collate function makes of samples that are all stored, leaf by leaf and not one by one.

        Returns:
            The batch, with `SentRows` for its inputs; None if the user has another function, or inputs are not alike.
        """
        if self.collate is not default_collate or default_collate_fn_map[Tensor] is not collate_tensor_fn:
            return None
        columns, number = [], 0
        for leaves in zip(*(stored[position] for position in range(len(stored))), strict=True):
            first = leaves[0]
            if isinstance(first, Absent):
                if any(leaf[:3] != first[:3] for leaf in leaves):
                    return None
                meta = Meta(first.shape, first.stride, first.torch_dtype, torch.device("cpu"))
                columns.append(_Column(SentRows(number, meta)))
            else:
                columns.append(_Column(default_collate(list(leaves))))
            number += type(first) in (Tensor, Absent)
        return collate([with_leaves(plan.structure, iter(columns))], collate_fn_map={_Column: _values_of})

    def batch_of(self, plan: Plan, samples: Kept) -> Loaded:
        """Collate samples that are there."""
        size, probe = len(plan.ids), plan.mode is Mode.PROBE
        inputs = range(len(_tensors(samples.loaded[0]))) if probe else plan.inputs
        tape = Tape(Keys(), size, lambda places: self.tensors(plan, places), lambda: None)
        # Torch's collate function looks a type up, and does no more with a tensor: a node will do.
        shown: Callable[[Node], Any] = as_it_is if self.collate is default_collate else show
        started = time.perf_counter()
        # Before collate, which may change them.
        fields = {at: _fields_of(sample, None if probe else inputs) for at, sample in samples.loaded.items()}
        recording = time.perf_counter() - started
        found = dict[int, Any]()
        for position, sample in samples.loaded.items():
            found[position] = with_leaves(sample, iter(_followed(tape, sample, position, inputs, shown)))
        for position, leaves in samples.stored.items():
            found[position] = with_leaves(plan.structure, iter(_with_rows(tape, leaves, position, shown)))
        with _knows_lazy_tensors():
            batch = self.collate([found[position] for position in range(size)])
        return Loaded(
            send(batch, keep_rows=bool(samples.stored)),
            plan,
            tuple(position in samples.stored for position in range(size)),
            tuple(fields.get(position) for position in range(size)),
            (this_worker(),) * size,
            recording=recording,
        )

    def tensors(self, plan: Plan, places: list[tuple[int, int]]) -> list[Tensor]:
        """Load samples of a planned batch; no random number of the process moves.

        Args:
            plan: plan of the batch.
            places: position in the batch and number of the tensor, of each tensor that is wanted.
        """
        with preserved_random_state():
            positions = sorted({position for position, _ in places})
            samples = self.fetch([plan.ids[position] for position in positions], _some(plan.seeds, positions))
        leaves = dict(zip(positions, map(_tensors, samples), strict=True))
        return [leaves[position][number] for position, number in places]

    def fetch(self, ids: Iterable[Any], seeds: tuple[int, ...] | None) -> Any:
        """Load samples as a DataLoader does: a list of them, or what the dataset's own ``__getitems__`` returns."""
        if seeds is not None:
            samples = []
            with preserved_random_state():
                for sample_id, seed in zip(ids, seeds, strict=True):
                    random.seed(seed)
                    np.random.seed(seed % 2**32)  # noqa: NPY002  # the generator that user code draws from
                    torch.manual_seed(seed)
                    samples.append(self.dataset[sample_id])
            return samples
        several = getattr(self.dataset, "__getitems__", None)
        return several(list(ids)) if several is not None else [self.dataset[sample_id] for sample_id in ids]

    def close(self) -> None:
        """Close the stores that were read. Safe to call twice."""
        for store in self._stores.values():
            if store is not None:
                store.close()
        self._stores = {}
        self._memory = FieldMemory()

    def _come_alone(self, plan: Plan, positions: list[int], samples: Any) -> bool:
        """Whether samples are those that the dataset returns one by one; they are compared in a probe only."""
        if plan.seeds is not None or not hasattr(self.dataset, "__getitems__"):
            return True
        if not isinstance(samples, Sequence) or len(samples) != len(positions):
            return False
        if plan.mode is not Mode.PROBE:
            return True
        with preserved_random_state(), contextlib.suppress(Exception):  # it may have no samples, but batches only
            alone = [self.dataset[plan.ids[position]] for position in positions]
            return list(map(_fields_of, samples)) == list(map(_fields_of, alone))
        return False

    def _watched(self, plan: Plan, positions: list[int]) -> tuple[Any, str | None, float]:
        """Load samples; return them, what that drew from or changed, and the seconds that the dataset took."""
        moving, state = self._moving, RandomState.current()
        if moving is None or not moving.are_same():
            moving = self._moving = Contents(self.dataset, moving=True)
        started = time.perf_counter()
        samples = self.fetch([plan.ids[position] for position in positions], _some(plan.seeds, positions))
        seconds = time.perf_counter() - started
        if plan.seeds is None and RandomState.current() != state:
            return samples, _GENERATOR, seconds
        path = None
        if not moving.are_same():
            self._moving = Contents(self.dataset, moving=True)
            path = changed(moving.digests, self._moving.digests)
        return samples, None if path is None else f"the dataset's attribute {path!r}", seconds

    def _stored(self, plan: Plan) -> dict[int, list[Any]]:
        """Leaves of samples as their entries hold them, without the inputs, by position."""
        if set(self._stores) - set(plan.stores):
            self.close()
        form = len(list(leaves_of(plan.structure))), plan.inputs
        if self._memory.form != form:
            self._memory = FieldMemory(*form)
        found = {}
        for position, (number, entry) in enumerate(zip(plan.stored, plan.entries, strict=False)):
            if number >= 0:
                read = functools.partial(self._fields, plan.stores[number], entry)
                leaves = self._memory.get(plan.stamps[position], read)
                if leaves is not None:
                    found[position] = leaves
        return found

    def _fields(self, folder: Path, entry: int) -> bytes:
        store = self._open(folder)
        fields = store.read_fields(entry) if store is not None else None
        return fields[STAMP_BYTES:] if fields is not None else b""

    def _open(self, folder: Path) -> ActivationStore | None:
        if folder not in self._stores:
            try:
                self._stores[folder] = ActivationStore(folder)
            except StoreError:  # removed since; the samples are loaded
                self._stores[folder] = None
        return self._stores[folder]


def _some(seeds: tuple[int, ...] | None, positions: Iterable[int]) -> tuple[int, ...] | None:
    return tuple(seeds[position] for position in positions) if seeds is not None else None


def _followed(tape: Tape, sample: Any, position: int, inputs: Iterable[int], shown: Callable[[Node], Any]) -> list[Any]:
    """The leaves of a loaded sample, with lazy tensors that have values for its inputs."""
    followed, count = set(inputs), itertools.count()
    return [
        shown(tape.row(position, number, Meta.of(leaf), leaf))
        if _is_tensor(leaf) and (number := next(count)) in followed
        else leaf
        for leaf in leaves_of(sample)
    ]


def as_it_is(loaded: Any) -> Any:
    """Return what it is given, such as a batch that the user's collate function has made already."""
    return loaded


class WorkerInit:
    """Shows the user's dataset to the user's ``worker_init_fn``, and to code that asks `get_worker_info`."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        """Run at the start of a worker process."""
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, PlannedDataset):
            answer_calls(info.dataset.tensors)
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._function is not None:
            self._function(worker)


def whole(plan: Plan, samples: Kept, load: Callable[[list[tuple[int, int]]], list[Tensor]]) -> list[Any]:
    """Return samples as their loader would, in the order of their positions; ``load`` inputs that are absent.

    Args:
        plan: of their batch.
        samples: the samples.
        load: returns tensors of samples: takes pairs of a position and a tensor's number.
    """
    places = [(position, number) for position in sorted(samples.stored) for number in plan.inputs]
    inputs = iter(load(places) if places else [])
    found = dict(samples.loaded)
    for position in sorted(samples.stored):
        leaves = [next(inputs) if isinstance(leaf, Absent) else leaf for leaf in samples.stored[position]]
        found[position] = with_leaves(plan.structure, iter(leaves))
    return [found[position] for position in sorted(found)]


def _tensors(sample: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(sample) if _is_tensor(leaf)]


def _is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor that a lazy one can stand for."""
    return type(leaf) is Tensor and has_values(leaf)


def _fields_of(sample: Any, inputs: Iterable[int] | None = None) -> bytes | None:
    """The encoded leaves of a sample, with descriptions in the place of its inputs; None if one cannot be encoded.

    Until the inputs are known, they are None: then it has both.
    """
    left_out, count = set(inputs or ()), itertools.count()
    try:
        if inputs is None:
            return encode(with_descriptions(list(leaves_of(sample))))
        leaves = []
        for leaf in leaves_of(sample):
            absent = _is_tensor(leaf) and next(count) in left_out
            leaves.append(Absent.of(leaf) if absent else leaf)
        return encode(leaves)
    except (TypeError, RuntimeError):  # of a type that is not kept on disk, or a layout without strides
        return None


def _with_rows(tape: Tape, leaves: list[Any], position: int, shown: Callable[[Node], Any]) -> list[Any]:
    """The leaves of a sample, with lazy tensors for those that are absent."""
    found, number = [], 0
    for leaf in leaves:
        if isinstance(leaf, Absent):
            meta = Meta(leaf.shape, leaf.stride, leaf.torch_dtype, torch.device("cpu"))
            leaf = shown(tape.row(position, number, meta))
            number += 1
        elif type(leaf) is Tensor:
            number += 1
        found.append(leaf)
    return found
