"""Gradient means over the ranks that computed them, by DDP's own reduction among all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_egeria.distributed.buckets import contributors_of, received_bytes
from lightning_egeria.distributed.exchange import GradientExchange
from lightning_egeria.distributed.reducer import rebuild_reducer
from lightning_egeria.upstream.ddp import settings_of, with_settings


class RescaledMean(GradientExchange):
    """Turns DDP's mean over all ranks into the mean over contributors.

    DDP takes a rank without a gradient for one whose gradient is zero, and divides by the number of ranks: a gradient
    of one contributor among four is diluted to a quarter. This multiplies it by ranks over contributors. DDP sends all
    gradients, so it saves no bytes. Communication hooks go on working.

    Args:
        strategy: strategy of the Trainer, with a DDP wrapper. Until `close`, wrappers expect unused parameters.
        layers: parameters of each layer module, front to back, and last of all that is in none.
    """

    replaces_ddp = False

    def __init__(self, strategy: Any, layers: Sequence[Sequence[nn.Parameter]]) -> None:
        self._strategy = strategy
        self._layers = layers
        self._context = contextlib.ExitStack()
        self._depths: tuple[int, ...] | None = None  # between `begin` and `finish`
        self._rebuilt = False

    def prepare(self) -> None:
        """Make DDP expect parameters without a gradient, before the first forward. Every rank must call it."""
        if not self._rebuilt:
            self._rebuilt = True
            if not settings_of(self._strategy).get("find_unused_parameters"):
                self._context.enter_context(with_settings(self._strategy, find_unused_parameters=True))
                rebuild_reducer(self._strategy, ())

    def begin(self, depths: Sequence[int]) -> None:
        """Rescale the gradients of the backward that comes next."""
        self._depths = tuple(depths)

    @torch.no_grad()
    def finish(self) -> None:
        """Rescale the gradients, once DDP has exchanged them."""
        depths, self._depths = self._depths, None
        if depths is None:
            return
        for index, layer in enumerate(self._layers):
            contributors = len(contributors_of(depths, index))
            if 0 < contributors < len(depths):
                for parameter in layer:
                    if parameter.grad is not None:
                        parameter.grad.mul_(len(depths) / contributors)

    def abort(self) -> None:
        """Rescale nothing: the backward does not come, or failed."""
        self._depths = None

    def close(self) -> None:
        """Let wrappers made from now on expect no unused parameters. Safe to call twice."""
        self._context.close()

    def received(self, depths: Sequence[int], rank: int) -> float:
        """Return the bytes that a rank receives in a step: the gradients of all that trains, whatever the depths."""
        total = sum(p.numel() * p.element_size() for layer in self._layers for p in layer if p.requires_grad)
        return received_bytes(total, len(depths), contributes=True)
