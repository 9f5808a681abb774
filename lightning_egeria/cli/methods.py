"""The methods of the package, as the folders of the methods declare them."""

from __future__ import annotations

import pkgutil
from graphlib import TopologicalSorter
from importlib import import_module

from lightning_egeria import caching, freezing, methods
from lightning_egeria.core.training.methods import Method


def _declared() -> dict[str, Method]:
    folders = [import_module(f"{methods.__name__}.{one.name}") for one in pkgutil.iter_modules(methods.__path__)]
    return {folder.METHOD.name: folder.METHOD for folder in (freezing, caching, *folders)}


METHODS: dict[str, Method] = _declared()
# Those that configurations and descriptions of jobs can switch on.
CONFIGURABLE: dict[str, Method] = {name: method for name, method in METHODS.items() if method.option}
# Those that wrap the data module, from the innermost to the outermost.
WRAPPERS: tuple[str, ...] = tuple(
    TopologicalSorter({name: method.around for name, method in METHODS.items() if method.wraps_data}).static_order()
)
