"""Replacing the ``forward`` of module instances, and restoring it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def own_forward(module: nn.Module, before: Forward | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What a replacement is reduced to: copies and pickles of a module compute with their own weights, unseen.

    Args:
        module: the module.
        before: ``forward`` of the instance before it was replaced; None if it had that of its class.
    """
    return (functools.partial, (type(module).forward, module)) if before is None else (_same, (before,))


def restore_forward(module: nn.Module, replacement: Forward, before: Forward | None) -> None:
    """Give a module its ``forward`` back.

    Args:
        module: the module.
        replacement: what replaced it. Where another replacement wraps it, that one wraps ``before`` from now on. Where
            other code wraps it, nothing is done.
        before: as in `own_forward`.
    """
    forward: Any = vars(module).get("forward")
    while isinstance(forward, ReplacedForward) and forward is not replacement:
        if forward.before is replacement:
            forward.before = before
        forward = forward.before
    if vars(module).get("forward") is not replacement:
        return
    if before is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = before


class ReplacedForward:
    """Base of what stands in for the ``forward`` of one module. A copy or pickle of the module has its own again.

    Attributes:
        module: the module.
        before: ``forward`` of the instance before it was replaced; None if it had that of its class.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, vars(module).get("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        return own_forward(self.module, self.before)


def users_forward(module: nn.Module) -> Forward | None:
    """Return the ``forward`` that other code has set on a module; None if it has that of its class."""
    forward: Any = vars(module).get("forward")
    while isinstance(forward, ReplacedForward):
        forward = forward.before
    return forward  # type: ignore[no-any-return]  # the attributes of a module have no types


class _Replacement(ReplacedForward):
    def __init__(self, module: nn.Module, call: Forward) -> None:
        super().__init__(module)
        functools.update_wrapper(self, module.forward, updated=())
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class ForwardReplacements:
    """Replaces the ``forward`` of module instances until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[_Replacement] = []

    def replace(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        """Replace ``module.forward`` by ``wrap(module.forward)`` until `restore`."""
        replacement = _Replacement(module, wrap(module.forward))
        vars(module)["forward"] = replacement
        self._replaced.append(replacement)

    def restore(self) -> None:
        """Restore every original. Safe to call twice."""
        while self._replaced:
            replacement = self._replaced.pop()
            restore_forward(replacement.module, replacement, replacement.before)


def _same(forward: Forward) -> Forward:
    return forward
