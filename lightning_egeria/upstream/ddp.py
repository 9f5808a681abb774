"""Private names of torch's `DistributedDataParallel`, and of Lightning's strategy that wraps a model with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.upstream.needs import lacking, unmentioned

_IGNORED = "_ddp_params_and_buffers_to_ignore"


def hooks_of(wrapped: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    """Return the communication hooks in Python, each with its state."""
    return list(wrapped._comm_hooks)


def builtin_hook_of(wrapped: DistributedDataParallel) -> Any:
    """Return the communication hook in C++; None without one."""
    name = wrapped._get_ddp_logging_data().get("comm_hook", "")
    kinds = dist.BuiltinCommHookType.__members__.values()  # type: ignore[attr-defined]  # it is not in ``__all__``
    return next((kind for kind in kinds if str(kind) == name), None)


def register_builtin_hook(wrapped: DistributedDataParallel, kind: Any) -> None:
    """Register a communication hook in C++."""
    wrapped._register_builtin_comm_hook(kind)


def end_exchange(wrapped: DistributedDataParallel) -> None:
    """Let a wrapper exchange no gradients any more, also for code that still holds it."""
    wrapped._remove_autograd_hooks()


@contextlib.contextmanager
def ignoring(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let wrappers that are made meanwhile ignore some buffers; DDP reads the list from the module."""
    before = vars(module).get(_IGNORED)
    vars(module)[_IGNORED] = {*(before or ()), *names}
    try:
        yield
    finally:
        del vars(module)[_IGNORED]
        if before is not None:
            vars(module)[_IGNORED] = before


def settings_of(strategy: Any) -> Mapping[str, Any]:
    """Return the arguments that Lightning's strategy gives to DDP."""
    settings: Mapping[str, Any] = strategy._ddp_kwargs
    return settings


@contextlib.contextmanager
def with_settings(strategy: Any, **settings: Any) -> Iterator[None]:
    """Let Lightning's strategy give some arguments to DDP meanwhile."""
    before = strategy._ddp_kwargs
    strategy._ddp_kwargs = {**before, **settings}
    try:
        yield
    finally:
        strategy._ddp_kwargs = before


def wrap(strategy: Any, module: nn.Module) -> DistributedDataParallel:
    """Wrap a module as Lightning's strategy does."""
    wrapped: DistributedDataParallel = strategy._setup_model(module)
    return wrapped


def averages_models(strategy: Any) -> bool:
    """Whether Lightning's strategy lets ranks differ between averages of their models (post-local SGD)."""
    return strategy._model_averaging_period is not None


def missing(strategy: Any) -> list[str]:
    """Return the private names that are missing, if a strategy uses DDP."""
    if type(strategy).__name__ != "DDPStrategy":  # `lightning` and `pytorch_lightning` have a class each
        return []
    found = lacking(strategy, ["_ddp_kwargs", "_setup_model", "_model_averaging_period"])
    methods = ["_remove_autograd_hooks", "_register_builtin_comm_hook", "_get_ddp_logging_data"]
    found += lacking(DistributedDataParallel, methods) + lacking(dist, ["BuiltinCommHookType"])
    return found + unmentioned(DistributedDataParallel, ["_comm_hooks", _IGNORED])
