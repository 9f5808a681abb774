"""The parameters of a class or function as the source of its module has them. No module is imported."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from lightning_egeria.core.programs import files
from lightning_egeria.errors import ArgumentError, near_match

_LARGEST_SOURCE = 2**22
_MOST_STEPS = 20  # from a name to where it is defined
_Parameters = tuple[Mapping[str, inspect.Parameter], bool]
_ANY: _Parameters = ({}, True)
_FINDERS = (
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    importlib.machinery.PathFinder,
)


def read_parameters(target: str, key: str) -> _Parameters:
    """Return the parameters of a class or function, and whether it may take any others.

    Args:
        target: its dotted name.
        key: of the configuration, for the message of an error.

    Raises:
        ArgumentError: there is no such class or function.
    """
    for _ in range(_MOST_STEPS):
        if not all(part.isidentifier() for part in target.split(".")):
            raise ArgumentError(f"{key}: cannot find {target!r}. Expected a name such as torch.nn.Linear")
        if (loaded := _loaded(target)) is not None:
            return _signature(loaded)
        try:
            module, tree, rest = _module_of(target)
        except (KeyError, ImportError):  # a package without a file, below another one
            return _ANY
        if module is None:
            raise ArgumentError(f"{key}: cannot find {target}. No module named {target.partition('.')[0]!r}")
        if tree is None or not rest:
            return _ANY  # a module in C, say
        moved = _found(tree, module, rest)
        if isinstance(moved, str):
            target = moved
        elif moved is None:
            near = near_match(rest[0], sorted(_names(tree)), f"{module}.")
            raise ArgumentError(f"{key}: cannot find {target}.{near or f' {module} has no {rest[0]}'}")
        else:
            return moved
    return _ANY


def _loaded(target: str) -> object | None:
    """Return what a name stands for in the modules that are imported already; None if that would import another."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        value: object = sys.modules.get(".".join(parts[:length]))
        if value is None:
            continue
        for name in parts[length:]:
            # Not `getattr`: modules that load their parts late would do so.
            value = vars(value).get(name) if isinstance(value, (ModuleType, type)) else None
        return getattr(value, "__func__", value)
    return None


def _signature(built: object) -> _Parameters:
    try:
        signature = inspect.signature(built)  # type: ignore[arg-type]  # whatever stands there
    except (TypeError, ValueError):
        return _ANY
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return signature.parameters, open_ended


def _module_of(target: str) -> tuple[str | None, ast.Module | None, list[str]]:
    """Return the module of a name, its source, and the rest of the name; no module if there is none."""
    parts, found, path = target.split("."), None, None
    for length in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:length]), path)
        if spec is None:
            break
        found, path = spec, spec.submodule_search_locations
        if path is None:
            break
    if found is None:
        return None, None, parts
    return found.name, _tree(found.origin), parts[found.name.count(".") + 1 :]


def _spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Return where a module is. `importlib.util.find_spec` would import the packages that it is in.

    Only Python's own finders are asked: those that packages have added may import.
    """
    for finder in _FINDERS:
        if (spec := finder.find_spec(name, path)) is not None:
            return spec
    return None


def _tree(origin: str | None) -> ast.Module | None:
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return ast.parse(files.read_at_most(Path(origin), _LARGEST_SOURCE))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module, those under conditions too."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.stmt):
                found.append(child)
            if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                waiting.append(child)
    return found


def _names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for one in _statements(tree):
        if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(one.name)
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in one.names}
        else:
            names |= {node.id for node in ast.walk(one) if isinstance(node, ast.Name)}
    return names


def _found(tree: ast.Module, module: str, rest: list[str]) -> _Parameters | str | None:
    """Return the parameters of a name in a module, or the name that it has in another module; None: it has none."""
    name, *inner = rest
    for one in _statements(tree):
        if isinstance(one, (ast.ClassDef, ast.FunctionDef)) and one.name == name:
            return _ANY if inner or one.decorator_list else _defined(one)
        if isinstance(one, ast.ImportFrom):
            for alias in one.names:
                if (alias.asname or alias.name) == name:
                    return ".".join([_source(one, module), alias.name, *inner])
    names = _names(tree)
    # Names may come from a star, a function of the module, or a module in C beside it.
    known = name in names or {"*", "__getattr__", "globals", "exec", "setattr"} & names
    return _ANY if known else None


def _source(one: ast.ImportFrom, module: str) -> str:
    """Return the module that names are imported from."""
    if not one.level:
        return one.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - one.level + _is_package(module)]
    return ".".join([*kept, *([one.module] if one.module else [])])


def _is_package(module: str) -> bool:
    parts, path = module.split("."), None
    for length in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:length]), path)
        path = spec.submodule_search_locations if spec is not None else None
    return path is not None


def _defined(one: ast.ClassDef | ast.FunctionDef) -> _Parameters:
    """Return the parameters of a function, or of a class that has its own way to be made."""
    if isinstance(one, ast.ClassDef):
        made = [part for part in one.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not made or one.keywords:
            return _ANY
        return _of_arguments(made[0].args, skip=1)
    return _of_arguments(one.args, skip=0)


def _of_arguments(arguments: ast.arguments, skip: int) -> _Parameters:
    kind = inspect.Parameter.KEYWORD_ONLY
    named = [*arguments.posonlyargs, *arguments.args][skip:] + arguments.kwonlyargs
    return {one.arg: inspect.Parameter(one.arg, kind) for one in named}, arguments.kwarg is not None
