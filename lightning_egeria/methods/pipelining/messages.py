"""What the ranks of a pipeline send each other: trees of tensors, and that a stage has failed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.errors import PipelineError, UnsupportedError

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
FAILED = object()
"""Sent instead of a value by a rank that has failed."""


@contextlib.contextmanager
def lost_connection(other: str) -> Iterator[None]:
    """Raise `PipelineError` where the back end cannot reach another rank."""
    try:
        yield
    except RuntimeError as error:
        raise PipelineError(
            f"lost the connection to {other}: it has ended, or waits for another process. Look at its output first"
        ) from error


def wait(work: Any, rank: int) -> None:
    """Wait for an exchange with a rank."""
    with lost_connection(f"rank {rank}"):
        work.wait()


def check_sendable(value: Any) -> None:
    """Refuse a tree with leaves that cannot be sent.

    Raises:
        UnsupportedError: if a leaf is neither None nor a tensor, or has a dtype that is not known, or the tree has a
            type that `torch.utils._pytree` cannot write.
    """
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.dtype not in _DTYPES:
            raise _refusal(leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__)
    try:
        is_kept = pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    except (NotImplementedError, TypeError):  # such as of a named tuple
        is_kept = False
    if not is_kept:
        raise _refusal(f"a tree with {type(value).__name__}")


def _refusal(kind: object) -> UnsupportedError:
    return UnsupportedError(
        f"a module of a stage returns {kind}, which cannot be sent to another stage. Return tensors in tuples, lists "
        "or dicts, or put both modules into one stage"
    )


def send_data(data: bytes, rank: int) -> None:
    """Send bytes, at least one, to a rank that calls `receive_data`."""
    dist.send(torch.tensor(len(data)), rank)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)


def receive_data(rank: int) -> bytes:
    """Return the bytes that a rank has sent."""
    size = torch.empty((), dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    return data.numpy().tobytes()


def send(value: Any, rank: int) -> None:
    """Send a tree of tensors and None, or `FAILED`, to a rank that calls `receive`."""
    if value is FAILED:
        send_data(b"null", rank)
        return
    leaves, spec = pytree.tree_flatten(value)
    forms = [None if leaf is None else [_DTYPES.index(leaf.dtype), *leaf.shape] for leaf in leaves]
    send_data(json.dumps([pytree.treespec_dumps(spec), forms]).encode(), rank)
    for leaf in leaves:
        if leaf is not None:
            dist.send(leaf.detach().contiguous(), rank)


def receive(rank: int) -> Any:
    """Return what a rank has sent."""
    described = json.loads(receive_data(rank))
    if described is None:
        return FAILED
    spec, forms = described
    leaves = [None if form is None else torch.empty(form[1:], dtype=_DTYPES[form[0]]) for form in forms]
    for leaf in leaves:
        if leaf is not None:
            dist.recv(leaf, rank)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(spec))


def saved(value: Any) -> bytes:
    """Return tensors in plain containers as bytes, for `loaded`."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def loaded(data: bytes, device: torch.device | None = None) -> Any:
    """Return what `saved` was given; nothing in it can run code."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location=device)


class Processes(Ranks):
    """All processes of a pipeline. A call that does not reach another one is a `PipelineError`."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[tuple[int, ...], Any] = {}

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Return the process group of some ranks, which all processes make together at the first call."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """As `Ranks.broadcast`."""
        with lost_connection("another rank"):
            return super().broadcast(tensor, source)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Ranks.gather`."""
        with lost_connection("another rank"):
            return super().gather(tensor)
