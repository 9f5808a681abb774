"""Linear layers of frozen attention, computed as fast as while they learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_egeria.upstream.torch import TorchDispatchMode


class Folding(TorchDispatchMode):
    """Multiplies by one matrix at once, where torch repeats it for each part of a batch.

    `torch.nn.MultiheadAttention` with ``batch_first`` transposes its input. Torch multiplies that as one matrix where
    the weights learn, and as one for each position where they are frozen: see
    https://github.com/pytorch/pytorch/issues/126973. On a CPU in bfloat16, that takes ten times as long. Last bits
    differ.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        if func is torch.ops.aten.bmm.default and args[1].stride(0) == 0 and args[1].shape[0]:
            parts, matrix = args
            return torch.mm(parts.flatten(0, 1), matrix[0]).unflatten(0, parts.shape[:2])
        return func(*args, **(kwargs or {}))


def folded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function with frozen linear layers computed fast."""
    with Folding():  # type: ignore[no-untyped-call]  # torch has no types for it
        return run(*args, **kwargs)
