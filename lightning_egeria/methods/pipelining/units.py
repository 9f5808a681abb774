"""Units: the modules of a model that are shared out among stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from lightning_egeria.errors import ArgumentError


def find_units(model: nn.Module, most: int) -> list[str]:
    """Return the paths of modules to share out: parts of containers, and of modules with more than ``most`` parameters.

    >>> find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), most=8)
    ['0', '2']
    """
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        if not has_state(module):
            return
        container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        large = sum(parameter.numel() for parameter in module.parameters()) > most
        if not path or (not own and (container or large) and any(map(has_state, module.children()))):
            for name, child in module.named_children():
                visit(f"{path}.{name}" if path else name, child)
        elif path not in found:
            found.append(path)

    visit("", model)
    return found


def modules_around(model: nn.Module, units: Collection[str]) -> list[nn.Module]:
    """Return the model and its modules that have a unit inside: their own code runs between units."""
    return [
        module
        for path, module in model.named_modules()
        if not path or any(unit.startswith(f"{path}.") for unit in units)
    ]


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def check_stages(model: nn.Module, stages: Mapping[str, Sequence[str]]) -> None:
    """Check the modules of named stages.

    Raises:
        ArgumentError: if there is no such module, one is named twice or is part of another, or one is left out.
    """
    modules, paths = dict(model.named_modules()), [path for found in stages.values() for path in found]
    for path in paths:
        if not path or path not in modules:
            raise ArgumentError(f"stages: the model has no module {path!r}. Names are those of named_modules()")
        if paths.count(path) > 1 or any(path.startswith(other + ".") for other in paths):
            raise ArgumentError(f"stages: module {path!r} is named twice, or is part of another one")
    for path, module in modules.items():
        placed = any(f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.") or not path for other in paths)
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and not placed:
            raise ArgumentError(f"stages: module {path!r} has parameters or buffers and is in no stage. Add it to one")
