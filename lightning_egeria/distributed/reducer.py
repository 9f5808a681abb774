"""Rebuilding the gradient reducer of DDP when the set of trained parameters changes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def rebuild_reducer(strategy: Any, frozen_buffers: Collection[str]) -> None:
    """Make DDP exchange the gradients of exactly the parameters that train now. Every rank must call it.

    DDP exchanges the gradients of the parameters that required one when it wrapped the model. This wraps the model
    again, as `DDPStrategy` does, with the same communication hooks. FSDP2 needs no rebuilding.

    Args:
        strategy: strategy of the Trainer; None, or one without DDP, changes nothing.
        frozen_buffers: names of buffers that no longer change, so DDP need not send them before each forward.
    """
    before = getattr(strategy, "model", None)
    if not isinstance(before, DistributedDataParallel):
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
