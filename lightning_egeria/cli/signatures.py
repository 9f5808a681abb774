"""The parameters of a class or function, and whether a value of a configuration fits one."""

from __future__ import annotations

import importlib
import inspect
import pydoc
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from lightning_egeria.cli.sources import read_parameters
from lightning_egeria.errors import ArgumentError, near_match

_OWN = __name__.partition(".")[0]


def check_value(key: str, value: Any, expected: Any, target: str) -> None:
    """Check a value against the annotation ``expected`` of an argument.

    Raises:
        ArgumentError: if it does not fit.
    """
    if not _fits(value, expected):
        raise ArgumentError(f"{key}: {target} expects {inspect.formatannotation(expected)}, got {value!r}")


def _fits(value: Any, expected: Any) -> bool:
    """Whether a value of a config file fits an annotation. None always fits, because annotations often omit it."""
    if value is None or isinstance(expected, str) or "_target_" in repr(value) or expected is inspect.Parameter.empty:
        return True
    if get_origin(expected) in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(expected) if member is not NoneType)
    try:
        msgspec.convert(value, str if hasattr(expected, "__fspath__") else expected)
    except msgspec.ValidationError:
        return isinstance(value, int) and expected in (bool, int, float)  # 0 and 1 may stand for false and true
    except TypeError:  # msgspec does not know the annotation: a protocol, or a callable
        return not isinstance(expected, type)
    return True


def parameters_of(target: str, key: str = "", importing: bool = True) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return the parameters of a class or function, and whether it takes any others.

    Args:
        target: its dotted name.
        key: of the configuration, for the message of an error.
        importing: whether its module may be imported, which runs it. If not, the source of modules that are neither of
            this package nor imported already is read; what it does not tell counts as right.

    Raises:
        ArgumentError: if there is no such class or function.
    """
    if not importing and target.partition(".")[0] != _OWN:
        return read_parameters(target, key)
    module, _, name = target.rpartition(".")
    near, built = "", None
    try:
        built = pydoc.locate(target)
        if built is None:
            near = near_match(name, dir(importlib.import_module(module)), f"{module}.")
    except (ImportError, pydoc.ErrorDuringImport) as error:
        near = f" {line_of(error)}"
    if built is None:
        raise ArgumentError(f"{key}: cannot find {target}.{near}")
    try:
        signature = inspect.signature(built, eval_str=True)  # type: ignore[arg-type]  # pydoc.locate returns object
    except NameError:  # an annotation imported for type checkers only
        signature = inspect.signature(built)  # type: ignore[arg-type]  # likewise
    except (TypeError, ValueError):
        return {}, True
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return signature.parameters, open_ended


def line_of(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split())
