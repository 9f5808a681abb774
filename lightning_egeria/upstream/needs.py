"""Saying which private name a version lacks."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any


def lacking(owner: Any, names: Iterable[str]) -> list[str]:
    """Return the names that an object has not, with the name of the object or of its class.

    >>> lacking(dict, ["get", "_hidden"])
    ['dict._hidden']
    """
    kind = owner if isinstance(owner, type) or hasattr(owner, "__path__") else type(owner)
    return [f"{kind.__name__}.{name}" for name in names if not hasattr(owner, name)]


def unmentioned(kind: type, names: Iterable[str]) -> list[str]:
    """Return the names that no method of a class mentions: attributes of instances that there are none of yet.

    >>> class Box:
    ...     def __init__(self): self._lid = None
    >>> unmentioned(Box, ["_lid", "_lock"])
    ['Box._lock']
    """
    codes = [member.__code__ for member in vars(kind).values() if isinstance(member, FunctionType)]
    known = {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}
    return [f"{kind.__name__}.{name}" for name in names if name not in known]
