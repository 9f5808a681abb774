"""What Lightning's strategies need when the frozen prefix changes, and which of them freezing was tried with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.errors import UnsupportedError

TRIED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_ALTERNATIVE = "use strategy='ddp' or ModelParallelStrategy (FSDP2)"
_REASONS = {
    "FSDPStrategy": "FSDP1 flattens the parameters of several layers into one, which cannot be frozen in part",
    "DeepSpeedStrategy": "DeepSpeed divides the optimizer among the ranks once, at the start, and goes on exchanging "
    "the gradients of what was frozen",
}


def check_strategy(trainer: pl.Trainer, allow_untested: bool) -> None:
    """See that freezing was tried with the strategy of the Trainer.

    Args:
        trainer: with its processes running.
        allow_untested: only warn.

    Raises:
        UnsupportedError: it was not; the message has the reason and what to use instead.
    """
    reason = _reason_against(trainer.strategy)
    if reason is None:
        return
    if not allow_untested:
        raise UnsupportedError(f"{reason}; allow_untested=True goes on at your own risk")
    rank_zero_warn(f"freezing: {reason}. allow_untested=True: training goes on, and may fail or learn wrong things")


def _reason_against(strategy: Any) -> str | None:
    name = type(strategy).__name__  # `lightning` and `pytorch_lightning` have a class each
    if name not in TRIED:
        why = _REASONS.get(name, f"freezing was not tried with {name}")
        return f"{why}; {_ALTERNATIVE}"
    if name == "DDPStrategy":
        if strategy._ddp_kwargs.get("static_graph"):
            return "static_graph=True promises DDP that what is trained never changes, but it does; leave it out"
        if strategy._model_averaging_period is not None:
            return "the ranks of post-local SGD differ in between, and freezing needs them equal; use plain DDP"
    if name == "ModelParallelStrategy" and strategy.device_mesh["tensor_parallel"].size() > 1:
        return "freezing was not tried with tensor parallelism; use tensor_parallel_size=1"
    return None


def prefix_changed(strategy: Any, frozen_buffers: Collection[str]) -> None:
    """Have the strategy notice which parameters need gradients now. Every rank must call it after the same step.

    DDP exchanges the gradients of those parameters that needed one when it wrapped the model, so the model is wrapped
    anew, as `DDPStrategy` itself did it, with the communication hooks of before. FSDP2 notices by itself.

    Args:
        strategy: of the Trainer.
        frozen_buffers: names of buffers that no longer change; DDP need not send them before each forward.
    """
    before = strategy.model
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
    """DDP reads of the module what it is to leave alone."""
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
    """PowerSGD remembers errors and factors by the number of the bucket; the buckets are others now."""
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        remembered = getattr(state, name, None)
        if isinstance(remembered, dict):
            remembered.clear()
