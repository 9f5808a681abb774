"""Replacing the ``forward`` of module instances, and restoring it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]


class ForwardReplacements:
    """Replaces the ``forward`` of module instances until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Forward, Forward | None]] = []

    def replace(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        """Replace ``module.forward`` by ``wrap(module.forward)`` until `restore`."""
        before = vars(module).get("forward")
        original = module.forward
        replacement = functools.wraps(original)(wrap(original))
        vars(module)["forward"] = replacement
        self._replaced.append((module, replacement, before))

    def restore(self) -> None:
        """Restore every original. Safe to call twice."""
        while self._replaced:
            module, replacement, before = self._replaced.pop()
            if vars(module).get("forward") is not replacement:
                continue  # other code replaced it later and wraps ours; removing ours would break it
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before
