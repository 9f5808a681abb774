"""What the user's hooks may do with a batch outside the training step."""

from __future__ import annotations

import dataclasses
import dis
import inspect
from typing import Any, NamedTuple

# Decorators of these packages hand the batch on, and do no more with it.
_DECORATORS = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch")
# These hooks are written so that they can do without.
_OWN = ("lightning_egeria.freezing", "lightning_egeria.report", "lightning_egeria.training")


@dataclasses.dataclass(frozen=True)
class BatchHooks:
    """What hooks may do with the batches of a run.

    Attributes:
        change: whether one may change a batch between the data loader and the training step, now or later.
        reason: why inputs have to be loaded, with the name of the hook; None: no hook needs them.
    """

    change: bool = False
    reason: str | None = None


class _Use(NamedTuple):
    used: bool  # the argument, apart from handing it to the same hook of the parent class
    goes_on: bool  # there


def uses_argument(owner: Any, name: str, place: int) -> bool:
    """Whether a hook does anything with one of its arguments, as far as its code shows.

    Args:
        owner: of the hook.
        name: of the hook.
        place: of the argument among those that come by position.

    >>> class Hooks:
    ...     def reads(self, outputs, batch, batch_idx):
    ...         return len(batch)
    ...     def leaves(self, outputs, batch, batch_idx):
    ...         return batch_idx
    >>> uses_argument(Hooks(), "reads", 1), uses_argument(Hooks(), "leaves", 1)
    (True, False)
    """
    if name in getattr(owner, "__dict__", {}):
        return _use_in(vars(owner)[name], name, place).used
    for kind in type(owner).__mro__:
        if name in vars(kind):
            use = _use_in(vars(kind)[name], name, place + 1)
            if use.used or not use.goes_on:
                return use.used
    return False


def _use_in(hook: Any, name: str, place: int) -> _Use:
    if inspect.ismethod(hook):
        hook, place = hook.__func__, place + 1
    while hasattr(hook, "__wrapped__") and _written_in(hook, _DECORATORS):
        hook = hook.__wrapped__
    code = getattr(hook, "__code__", None)
    if code is None:
        return _Use(True, False)  # there is nothing to look at
    if _written_in(hook, _OWN):
        return _Use(False, False)
    if place < code.co_argcount:
        argument = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:  # whose name comes behind those of all others
        argument = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    else:
        return _Use(False, False)
    used, goes_on, going_on = argument in code.co_cellvars, False, False
    for step in dis.get_instructions(code):
        if going_on and "CALL" in step.opname:
            going_on = False
        elif "LOAD" in step.opname and step.argval == name and "super" in code.co_names:
            going_on = goes_on = True
        elif "LOAD" in step.opname and not going_on:
            used |= argument in (step.argval if isinstance(step.argval, tuple) else (step.argval,))
    return _Use(used, goes_on)


def _written_in(function: Any, packages: tuple[str, ...]) -> bool:
    """Where its code is, that is; its ``__module__`` may be that of what it wraps."""
    module = f"{getattr(function, '__globals__', {}).get('__name__', '')}."
    return any(module.startswith(f"{package}.") for package in packages)
