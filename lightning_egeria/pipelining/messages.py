"""What the ranks of a pipeline send each other: trees of tensors, and that a stage has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

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
_MOST_DIMENSIONS = 8
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
        UnsupportedError: if a leaf is neither None nor a tensor, or has a dtype or dimensions that are not known, or
            the tree has a type that `torch.utils._pytree` cannot write.
    """
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.dtype not in _DTYPES or leaf.ndim > _MOST_DIMENSIONS:
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


def send(value: Any, rank: int) -> None:
    """Send a tree of tensors and None, or `FAILED`, to a rank that calls `receive`."""
    if value is FAILED:
        dist.send(torch.tensor([-1, 0]), rank)
        return
    leaves, spec = pytree.tree_flatten(value)
    text = pytree.treespec_dumps(spec).encode()
    dist.send(torch.tensor([len(leaves), len(text)]), rank)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank)
    for leaf in leaves:
        if leaf is None:
            dist.send(torch.full((_MOST_DIMENSIONS + 2,), -1), rank)
            continue
        shape = [*leaf.shape, *[0] * (_MOST_DIMENSIONS - leaf.ndim)]
        dist.send(torch.tensor([leaf.ndim, _DTYPES.index(leaf.dtype), *shape]), rank)
        dist.send(leaf.detach().contiguous(), rank)


def receive(rank: int) -> Any:
    """Return what a rank has sent."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, rank)
    if int(sizes[0]) < 0:
        return FAILED
    text = torch.empty(int(sizes[1]), dtype=torch.uint8)
    dist.recv(text, rank)
    leaves: list[Tensor | None] = []
    for _ in range(int(sizes[0])):
        header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64)
        dist.recv(header, rank)
        dimensions, dtype, *shape = header.tolist()
        leaf = torch.empty(shape[:dimensions], dtype=_DTYPES[dtype]) if dimensions >= 0 else None
        leaves.append(leaf)
        if leaf is not None:
            dist.recv(leaf, rank)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(bytes(text.numpy()).decode()))
