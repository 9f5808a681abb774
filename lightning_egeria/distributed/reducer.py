"""Rebuilding the gradient reducer of DDP when the set of trained parameters changes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle


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
    hooks, builtin = list(before._comm_hooks), _builtin_hook(before)
    before._remove_autograd_hooks()  # whoever still holds the old wrapper must not exchange gradients twice
    strategy.model = strategy.lightning_module
    kwargs = strategy._ddp_kwargs
    if "init_sync" in inspect.signature(DistributedDataParallel).parameters:
        # The ranks are equal. Older torch sends all weights once more, and writes them where they are already.
        strategy._ddp_kwargs = {**kwargs, "init_sync": False}
    try:
        with _ignored(strategy.lightning_module, frozen_buffers):
            wrapped = strategy._setup_model(strategy.lightning_module)
    finally:
        strategy._ddp_kwargs = kwargs
    for hook, state in hooks:
        _forget_buckets(state)
        wrapped.register_comm_hook(state, hook)
    if builtin is not None:
        wrapped._register_builtin_comm_hook(builtin)
    strategy.model = wrapped


def wrapped_by_ddp(strategy: Any) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a strategy; None if it has none."""
    model = getattr(strategy, "model", None)
    return model if isinstance(model, DistributedDataParallel) else None


def has_communication_hook(wrapped: DistributedDataParallel) -> bool:
    """Whether a hook changes how DDP exchanges gradients, for example to compress them."""
    return bool(wrapped._comm_hooks) or _builtin_hook(wrapped) is not None


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


@contextlib.contextmanager
def expecting_unused(strategy: Any) -> Iterator[None]:
    """Make DDP expect parameters without a gradient in wrappers made from now on, until the body ends."""
    before = strategy._ddp_kwargs
    strategy._ddp_kwargs = {**before, "find_unused_parameters": True}
    try:
        yield
    finally:
        strategy._ddp_kwargs = before


@contextlib.contextmanager
def _ignored(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Tell DDP which buffers to ignore; it reads the list from the module."""
    attribute = "_ddp_params_and_buffers_to_ignore"
    before = vars(module).get(attribute)
    vars(module)[attribute] = {*(before or ()), *names}
    try:
        yield
    finally:
        del vars(module)[attribute]
        if before is not None:
            vars(module)[attribute] = before


def _builtin_hook(wrapped: DistributedDataParallel) -> Any:
    name = wrapped._get_ddp_logging_data().get("comm_hook", "")
    kinds = dist.BuiltinCommHookType.__members__.values()  # type: ignore[attr-defined]  # it is not in ``__all__``
    return next((kind for kind in kinds if str(kind) == name), None)


def _forget_buckets(state: object) -> None:
    """Clear PowerSGD's errors and factors, which it keeps by bucket number: the buckets have changed."""
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        remembered = getattr(state, name, None)
        if isinstance(remembered, dict):
            remembered.clear()
