"""Rebuilding the gradient reducer of DDP when the set of trained parameters changes."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_egeria.upstream.ddp import (
    builtin_hook_of,
    end_exchange,
    hooks_of,
    ignoring,
    register_builtin_hook,
    with_settings,
    wrap,
)


def rebuild_reducer(strategy: Any, frozen_buffers: Collection[str]) -> None:
    """Make DDP exchange the gradients of exactly the parameters that train now. Every rank must call it.

    DDP exchanges the gradients of the parameters that required one when it wrapped the model. This wraps the model
    again, as `DDPStrategy` does, with the same communication hooks. FSDP2 needs no rebuilding.

    Args:
        strategy: strategy of the Trainer; None, or one without DDP, changes nothing.
        frozen_buffers: names of buffers that no longer change, so DDP need not send them before each forward.
    """
    before = wrapped_by_ddp(strategy)
    if before is None:
        return
    hooks, builtin = hooks_of(before), builtin_hook_of(before)
    end_exchange(before)  # code that still holds the old wrapper must not exchange gradients twice
    strategy.model = strategy.lightning_module
    # The ranks are equal. Older torch sends all weights once more, and writes them where they are already.
    knows_sync = "init_sync" in inspect.signature(DistributedDataParallel).parameters
    with (
        with_settings(strategy, **({"init_sync": False} if knows_sync else {})),
        ignoring(strategy.lightning_module, frozen_buffers),
    ):
        wrapped = wrap(strategy, strategy.lightning_module)
    for hook, state in hooks:
        _forget_buckets(state)
        wrapped.register_comm_hook(state, hook)
    if builtin is not None:
        register_builtin_hook(wrapped, builtin)
    strategy.model = wrapped


def wrapped_by_ddp(strategy: Any) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a strategy; None if it has none."""
    model = getattr(strategy, "model", None)
    return model if isinstance(model, DistributedDataParallel) else None


def has_communication_hook(wrapped: DistributedDataParallel) -> bool:
    """Whether a hook changes how DDP exchanges gradients, for example to compress them."""
    return bool(hooks_of(wrapped)) or builtin_hook_of(wrapped) is not None


class ReducerSwitch:
    """Watches which backwards DDP exchanges gradients in, and can leave the exchange of one to other code.

    In an accumulation window, DDP exchanges in the last backward only. The wrapper itself knows which that is.

    Args:
        strategy: strategy of the Trainer. Its wrapper may be replaced between two batches.

    Attributes:
        exchanges: whether DDP would exchange the gradients of this backward.
    """

    def __init__(self, strategy: Any) -> None:
        self.exchanges = False
        self._strategy = strategy
        self._leave_out = False
        self._left_out: DistributedDataParallel | None = None
        self._handle: RemovableHandle | None = None

    def batch_start(self, leave_out: bool) -> None:
        """Watch the forward that comes next.

        Args:
            leave_out: let DDP exchange nothing in its backward.
        """
        self.restore()
        self.exchanges, self._leave_out = False, leave_out
        wrapped = wrapped_by_ddp(self._strategy)
        if wrapped is not None:
            self._handle = wrapped.register_forward_pre_hook(self._before_forward)

    def restore(self) -> None:
        """Let DDP exchange gradients again. Safe to call twice."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        wrapped, self._left_out = self._left_out, None
        if wrapped is not None:
            wrapped.require_backward_grad_sync = True
            wrapped.require_forward_param_sync = True  # DDP sends buffers, such as running statistics, as before

    def _before_forward(self, wrapped: nn.Module, inputs: Any) -> None:
        assert isinstance(wrapped, DistributedDataParallel)
        if self._left_out is not None:
            return  # a second forward of the batch
        self.exchanges = wrapped.require_backward_grad_sync
        if self.exchanges and self._leave_out:
            wrapped.require_backward_grad_sync = False
            self._left_out = wrapped


def _forget_buckets(state: object) -> None:
    """Clear PowerSGD's errors and factors, which it keeps by bucket number: the buckets have changed."""
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        remembered = getattr(state, name, None)
        if isinstance(remembered, dict):
            remembered.clear()
