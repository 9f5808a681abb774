"""Running the reference model: in a process beside training, or in the training thread."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from lightning_egeria.core.distributed.gathering import fill
from lightning_egeria.core.snapshots.module_attributes import CodeValues
from lightning_egeria.core.snapshots.packing import PackedObject, copied, pack, unpack
from lightning_egeria.core.snapshots.random_state import preserved_random_state
from lightning_egeria.core.snapshots.worker import Worker
from lightning_egeria.errors import CheckpointError
from lightning_egeria.freezing.reference import EvaluationRequest, EvaluationResult, ReferenceModel


def has_idle_core(device: torch.device, processes: int = 1) -> bool:
    """Return whether the threads of training leave a core of this machine idle.

    If training uses all cores, a process of low priority answers late or never, and the training thread does the same
    work in time. Data-loader workers and other programs are not counted: `ReferenceComparison` acts on late answers.

    Args:
        device: device that trains; on other devices than the CPU, a core is taken to be idle.
        processes: number of processes that train on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return device.type != "cpu" or processes * torch.get_num_threads() < cores


@contextlib.contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore what code of copies of a network may change outside of them, such as random state and globals."""
    values = CodeValues(modules)
    with preserved_random_state():
        try:
            yield
        finally:
            values.restore()


class _Host:
    """One reference model, in a process or in the calling thread."""

    def __init__(self, make: Callable[[], ReferenceModel], background: bool) -> None:
        self._make = make
        self._snapshot = -1  # number of the snapshot that the reference has
        self._answer: Future[EvaluationResult] | None = None  # of the last evaluation
        self._inline = None if background else make()
        self.worker = Worker(make) if background else None
        self.busy_since = 0.0

    def evaluate(self, evaluation: PackedObject, snapshot: PackedObject, number: int) -> Future[EvaluationResult]:
        if self._answer is not None and self._answer.exception() is not None:
            self._snapshot = -1  # the snapshot with that evaluation may not have arrived
        newer = snapshot if number != self._snapshot else pack(None, for_process=self.worker is not None)
        self._snapshot, self.busy_since = number, time.monotonic()
        if self.worker is not None:
            self._answer = self.worker.call(evaluation, newer)
            return self._answer
        assert self._inline is not None
        answer = self._answer = Future()
        try:
            evaluation.wait()
            snapshot.wait()
            # A copy, because the network may change its buffers and the snapshot must stay the same.
            asked, reference = unpack(evaluation), unpack(newer.to_host())
            with untouched(asked.network.values()):
                answer.set_result(self._inline(asked, reference))
        except Exception as error:  # the user's modules may raise anything; the future carries it
            answer.set_exception(error)
        return answer

    def revive(self) -> None:
        """Replace a process that has ended."""
        if self.worker is not None and self.worker.ended:
            self.worker.close()
            self.worker, self._snapshot = Worker(self._make), -1


class ReferenceRunner:
    """Runs evaluations against the latest snapshot, one at a time.

    Args:
        make: returns a new reference model.
        entries: paths of the modules in a snapshot.
        background: True runs the reference in a process with one thread of torch, which starts with the first snapshot.
            False runs it in the calling thread, with the same result.
        timeout_s: seconds after which a process that has not answered is ended, and replaced at the next evaluation.

    Attributes:
        evaluation_bytes: bytes sent for the last evaluation, without a snapshot.
        snapshot: the latest snapshot, packed; None without one.
        snapshot_bytes: its size in bytes.
    """

    def __init__(
        self,
        make: Callable[[], ReferenceModel],
        entries: tuple[str, ...],
        background: bool,
        timeout_s: float,
    ) -> None:
        self.evaluation_bytes = 0
        self.snapshot_bytes = 0
        self._entries = entries
        self._timeout_s = timeout_s
        self._make = make
        self._background = background
        self._host: _Host | None = None
        self.snapshot: PackedObject | None = None
        self._named: dict[str, int] = {}  # weights and buffers among its tensors
        self._number = 0
        self._is_checked = False

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot to compare with."""
        return self.snapshot is not None

    @property
    def worker(self) -> Worker | None:
        """The reference process; None if there is none."""
        return self._host.worker if self._host is not None else None

    def take_snapshot(self, module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> None:
        """Make the current network the reference, from the next evaluation on.

        The calling thread only copies weights and buffers; the reference does the rest.

        Args:
            module: the model.
            weights: gathered weights by name, if FSDP2 shards them.

        Raises:
            Exception: if a part of the network cannot be pickled.
        """
        network = self._network(module)
        packed = pack(network, self._background)
        self._name(network, packed)
        self._keep(_gathered(packed, network, weights).to_host())

    def snapshot_tensors(self) -> dict[str, Tensor] | None:
        """Return weights and buffers of the snapshot by name, for a checkpoint; None without a snapshot."""
        if self.snapshot is None:
            return None
        self.snapshot.wait()
        return {name: self.snapshot.tensors[index] for name, index in self._named.items()}

    def restore_snapshot(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Restore a snapshot from the structure of ``module`` and the tensors of `snapshot_tensors`.

        Buffers of another shape (a table that grows with the input) and tensors that are neither weight nor buffer take
        their current values.

        Raises:
            CheckpointError: if a weight does not fit.
        """
        network = self._network(module)
        packed = pack(network, self._background)
        self._name(network, packed)
        names = _names(network)
        for index, now in enumerate(packed.tensors):
            name = names.get(id(now))
            then = tensors.get(name) if name is not None else None
            if then is not None and then.shape == now.shape:
                packed.tensors[index] = then
            elif name is not None and isinstance(now, nn.Parameter):
                found = "no such weight" if then is None else f"{tuple(then.shape)}"
                raise CheckpointError(
                    f"the reference model in the checkpoint does not fit this model: {name!r} has shape "
                    f"{tuple(now.shape)}, the checkpoint has {found}"
                )
        self._keep(packed.to_host())

    def move_to_thread(self, module: nn.Module) -> None:
        """End the process, and run the reference in the calling thread from now on, with the same weights.

        Args:
            module: the model, with the structure of the snapshot.

        Raises:
            Exception: if a part of the network cannot be copied.
        """
        tensors = self.snapshot_tensors()
        self.drop_snapshot()
        self._background = False
        if tensors is not None:
            self.restore_snapshot(module, tensors)

    def drop_snapshot(self) -> None:
        """Drop the snapshot and end the process. Safe to call twice."""
        if self.worker is not None:
            self.worker.close()
        self._host = self.snapshot = None

    def ready(self) -> bool:
        """Whether the reference is free. Ends a process that hangs, and replaces one that has ended."""
        return self._free_host() is not None

    def submit(
        self, evaluation: EvaluationRequest, weights: Mapping[str, Tensor] | None = None
    ) -> Future[EvaluationResult] | None:
        """Start an evaluation. The calling thread copies its tensors.

        Args:
            evaluation: the evaluation.
            weights: gathered weights of its network by name, if FSDP2 shards them.

        Returns:
            Future of the result; None if the reference is busy.

        Raises:
            Exception: if an argument cannot be pickled.
        """
        assert self.snapshot is not None, "an evaluation needs a snapshot first"
        host = self._free_host()
        if host is None:
            return None
        if self._background and not self._is_checked and weights is None:
            self._is_checked = True
            evaluation = dataclasses.replace(evaluation, expected=self._expected(evaluation))
        packed = _gathered(pack(evaluation, self._background), evaluation.network, weights).to_host()
        self.evaluation_bytes = packed.size_bytes
        return host.evaluate(packed, self.snapshot, self._number)

    def _expected(self, evaluation: EvaluationRequest) -> list[Tensor] | None:
        """Return what the network returns in this process, for the reference process to compare once."""
        try:
            here = copied(evaluation, to_host=False)
            with untouched(here.network.values()):
                return self._make().outputs(here)
        except Exception:  # the user's modules may raise anything; the reference process reports it
            return None

    def _free_host(self) -> _Host | None:
        host = self._host
        if host is None:
            return None
        worker = host.worker
        if worker is not None and not worker.idle and time.monotonic() - host.busy_since > self._timeout_s:
            worker.kill(f"no answer within {self._timeout_s:g} s; the process was ended")
        host.revive()
        return host if host.worker is None or host.worker.idle else None

    def _network(self, module: nn.Module) -> dict[str, nn.Module]:
        return {path: module.get_submodule(path) for path in self._entries}

    def _name(self, network: Mapping[str, nn.Module], packed: PackedObject) -> None:
        names = _names(network)
        self._named = {names[id(tensor)]: index for index, tensor in enumerate(packed.tensors) if id(tensor) in names}

    def _keep(self, packed: PackedObject) -> None:
        self._host = self._host or _Host(self._make, self._background)
        self.snapshot, self.snapshot_bytes = packed, packed.size_bytes
        self._number += 1


def _gathered(
    packed: PackedObject, network: Mapping[str, nn.Module], weights: Mapping[str, Tensor] | None
) -> PackedObject:
    """Replace sharded weights in the packed object by gathered ones."""
    if weights is not None:
        packed.tensors = fill(packed.tensors, _names(network), weights)
    return packed


def _names(network: Mapping[str, nn.Module]) -> dict[int, str]:
    """Names of weights and buffers, by the ``id`` of the tensor."""
    return {
        id(tensor): name
        for path, entry in network.items()
        for name, tensor in (*entry.named_parameters(path), *entry.named_buffers(path))
    }
