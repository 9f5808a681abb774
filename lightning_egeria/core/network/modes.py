"""Layers that compute something else in evaluation mode, as far as a look at them tells."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def effect_of_evaluation(module: nn.Module, paths: Iterable[str]) -> str | None:
    """Return what evaluation mode changes in some submodules that are frozen, in words; None if nothing is known to.

    >>> effect_of_evaluation(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), ["0", "1"])
    "dropout in frozen layers, such as '1', is off"
    """
    modules = {path: module.get_submodule(path) for path in paths}
    if (dropping := next((path for path, part in modules.items() if drops(part)), None)) is not None:
        return f"dropout in frozen layers, such as {dropping!r}, is off"
    if (looks := next((path for path, part in modules.items() if looks_at_its_mode(part)), None)) is not None:
        return f"frozen layers whose output depends on the mode, such as {looks!r}, are in evaluation mode"
    return None


def drops(module: nn.Module) -> bool:
    """Whether a module drops something at random, as far as its name or a setting of it tells.

    >>> drops(nn.Dropout(0.1)), drops(nn.Dropout(0)), drops(nn.MultiheadAttention(4, 2, dropout=0.1))
    (True, False, True)
    """
    kind = type(module).__name__.lower()
    is_one = "drop" in kind or "stochastic" in kind
    settings = ((name, value) for name, value in vars(module).items() if isinstance(value, float) and value > 0)
    return any("drop" in name or (is_one and name == "p") for name, _ in settings)


def looks_at_its_mode(module: nn.Module) -> bool:
    """Whether what a module computes may depend on its mode, as far as its code tells; not so for layers of torch.

    >>> looks_at_its_mode(nn.Linear(4, 4)), looks_at_its_mode(nn.RReLU())
    (False, True)
    """
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    own = isinstance(module, nn.RReLU) or not type(module).__module__.startswith("torch.nn.")
    return own and code is not None and "training" in code.co_names
