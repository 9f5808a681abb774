"""The reference models and the processes that they run in."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor, nn

from lightning_egeria.errors import CheckpointError
from lightning_egeria.freezing.parcels import Parcel, pack, unpack
from lightning_egeria.freezing.reference import Comparison, Evaluation, ReferenceModel
from lightning_egeria.freezing.sharded import fill
from lightning_egeria.freezing.workers import Worker


def idle_workers(device: torch.device) -> int:
    """How many processes find a core of their own beside training on ``device``: one or none.

    Where training has all cores, a process of low priority answers late or not at all; the training thread does the
    same work in time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(device.type != "cpu" or torch.get_num_threads() < cores)


class _Place:
    """Where one reference model runs: in a process, or in the calling thread."""

    def __init__(self, make: Callable[[], ReferenceModel], threads: int | None) -> None:
        self._make = make
        self._threads = threads
        self._snapshot = -1  # number of the one that the reference here was made from
        self._answer: Future[Comparison] | None = None  # to the last evaluation
        self._inline = make() if threads is None else None
        self.worker = Worker(make, threads) if threads is not None else None
        self.busy_since = 0.0

    def evaluate(self, evaluation: Parcel, snapshot: Parcel, number: int) -> Future[Comparison]:
        if self._answer is not None and self._answer.exception() is not None:
            self._snapshot = -1  # the one that came with that evaluation may not have arrived
        newer = snapshot if number != self._snapshot else pack(None)
        self._snapshot, self.busy_since = number, time.monotonic()
        if self.worker is not None:
            self._answer = self.worker.call(evaluation, newer)
            return self._answer
        assert self._inline is not None
        answer = self._answer = Future()
        try:
            evaluation.wait()
            snapshot.wait()
            # Copied, because the snapshot has to stay what it is whatever the network does with its buffers.
            with _own_randomness():
                answer.set_result(self._inline(unpack(evaluation), unpack(newer.to_host())))
        except Exception as error:  # whatever the user's modules raise belongs to the one who reads the result
            answer.set_exception(error)
        return answer

    def revive(self) -> None:
        """Put a new process in the place of one that ended."""
        if self.worker is not None and self.worker.ended and self._threads is not None:
            self.worker.close()
            self.worker, self._snapshot = Worker(self._make, self._threads), -1


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """What a network draws inside (in evaluation mode too, if it is made so) is not missing outside."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002  # what users draw from
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


class ReferencePool:
    """Runs evaluations, each where nothing else is being done, against the newest snapshot.

    Args:
        make: gives a reference model.
        entries: paths of the modules that a snapshot holds.
        workers: processes, started with the first snapshot; 0 runs the reference in the calling thread, to the same
            result.
        threads_per_worker: intra-op threads of torch in each.
        timeout_s: a worker that has not answered for so long is ended, and replaced when it is needed next.

    Attributes:
        evaluation_bytes: what the last evaluation sent, without a snapshot.
        snapshot_bytes: size of the last snapshot.
    """

    def __init__(
        self,
        make: Callable[[], ReferenceModel],
        entries: tuple[str, ...],
        workers: int,
        threads_per_worker: int,
        timeout_s: float,
    ) -> None:
        self.evaluation_bytes = 0
        self.snapshot_bytes = 0
        self._entries = entries
        self._timeout_s = timeout_s
        self._make = make
        self._threads: list[int | None] = [threads_per_worker] * workers or [None]
        self._places: list[_Place] = []
        self._snapshot: Parcel | None = None
        self._named: dict[str, int] = {}  # which of its tensors are weights and buffers
        self._number = 0

    @property
    def has_snapshot(self) -> bool:
        """Whether there is something to compare with."""
        return self._snapshot is not None

    @property
    def workers(self) -> list[Worker]:
        """The processes."""
        return [place.worker for place in self._places if place.worker is not None]

    def take_snapshot(self, module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        """The reference is the network with the weights of this moment, from the next evaluation on.

        The calling thread copies the weights and buffers; everything else is done where the reference is.

        Args:
            module: the model.
            weights: those that are divided among ranks, gathered, by name.

        Raises:
            Exception: whatever pickling raises for a part that cannot be sent.
        """
        network = self._network(module)
        parcel = pack(network)
        self._name(network, parcel)
        self._keep(_gathered(parcel, network, weights).to_host())

    def snapshot_tensors(self) -> dict[str, Tensor] | None:
        """Weights and buffers of the snapshot by name, for a checkpoint."""
        if self._snapshot is None:
            return None
        self._snapshot.wait()
        return {name: self._snapshot.tensors[place] for name, place in self._named.items()}

    def restore_snapshot(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Put a snapshot together from the structure of ``module`` and what `snapshot_tensors` gave.

        Buffers that the module does not have in this shape, and tensors that hang on it otherwise, are those of now:
        tables that grow with the input, what a step has left for the end of the epoch.

        Raises:
            CheckpointError: the weights do not fit.
        """
        network = self._network(module)
        parcel = pack(network)
        self._name(network, parcel)
        names = _names(network)
        for place, now in enumerate(parcel.tensors):
            name = names.get(id(now))
            then = tensors.get(name) if name is not None else None
            if then is not None and then.shape == now.shape:
                parcel.tensors[place] = then
            elif name is not None and isinstance(now, nn.Parameter):
                found = "none" if then is None else f"one of shape {tuple(then.shape)}"
                raise CheckpointError(
                    f"the reference model in the checkpoint does not fit the model: of {name!r}, of shape "
                    f"{tuple(now.shape)}, it has {found}"
                )
        self._keep(parcel.to_host())

    def drop_snapshot(self) -> None:
        """End all workers: nothing is to be compared, until there is a new snapshot. Safe to call twice."""
        for worker in self.workers:
            worker.close()
        self._places, self._snapshot = [], None

    def ready(self) -> bool:
        """Whether an evaluation would be taken now. A worker that hangs is ended, one that has ended is replaced."""
        return self._free_place() is not None

    def submit(self, evaluation: Evaluation, weights: Mapping[str, Tensor] | None = None) -> Future[Comparison] | None:
        """Have ``evaluation`` made; None if every worker is busy. The calling thread copies its tensors.

        Args:
            evaluation: to be made.
            weights: of its network that are divided among ranks, gathered, by name.

        Raises:
            Exception: whatever pickling raises for an argument that cannot be sent.
        """
        assert self._snapshot is not None, "an evaluation needs a snapshot first"
        place = self._free_place()
        if place is None:
            return None
        parcel = _gathered(pack(evaluation), evaluation.network, weights).to_host()
        self.evaluation_bytes = parcel.size_bytes
        return place.evaluate(parcel, self._snapshot, self._number)

    def _free_place(self) -> _Place | None:
        for place in self._places:
            worker = place.worker
            if worker is not None and not worker.idle and time.monotonic() - place.busy_since > self._timeout_s:
                worker.kill(f"it did not answer within {self._timeout_s:g} s and was ended")
            place.revive()
            if place.worker is None or place.worker.idle:
                return place
        return None

    def _network(self, module: nn.Module) -> dict[str, nn.Module]:
        return {path: module.get_submodule(path) for path in self._entries}

    def _name(self, network: Mapping[str, nn.Module], parcel: Parcel) -> None:
        names = _names(network)
        self._named = {names[id(tensor)]: place for place, tensor in enumerate(parcel.tensors) if id(tensor) in names}

    def _keep(self, parcel: Parcel) -> None:
        self._places = self._places or [_Place(self._make, threads) for threads in self._threads]
        self._snapshot, self.snapshot_bytes = parcel, parcel.size_bytes
        self._number += 1


def _gathered(parcel: Parcel, network: Mapping[str, nn.Module], weights: Mapping[str, Tensor] | None) -> Parcel:
    """The parcel, with gathered weights in the place of those that are divided among ranks."""
    if weights is not None:
        parcel.tensors = fill(parcel.tensors, _names(network), weights)
    return parcel


def _names(network: Mapping[str, nn.Module]) -> dict[int, str]:
    """Of weights and buffers, by the ``id`` of the tensor."""
    return {
        id(tensor): name
        for path, entry in network.items()
        for name, tensor in (*entry.named_parameters(path), *entry.named_buffers(path))
    }
