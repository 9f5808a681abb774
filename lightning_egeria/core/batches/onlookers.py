"""Modes of torch that watch a training step, and what runs without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily


class Onlooker(TorchFunctionMode):
    """A mode that watches a step. Under any mode, attention takes another kernel, with other last bits."""


def unwatched(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function without the innermost mode, if that is an `Onlooker`."""
    if not isinstance(_get_current_function_mode(), Onlooker):
        return run(*args, **kwargs)
    with _pop_mode_temporarily():
        return run(*args, **kwargs)
