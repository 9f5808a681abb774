"""Calls of frozen layers, which can be run later in the modes of torch that they were made in."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_egeria.caching.record.tape import Node, Unit
from lightning_egeria.core.snapshots.contents import PLAIN
from lightning_egeria.errors import CacheError


class Context(NamedTuple):
    """Modes of torch that a layer module runs in."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls, devices: tuple[str, ...]) -> Context:
        """Return the modes that are on."""
        casts = tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices])
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts)


class UnitCall(Unit):
    """One call of a frozen layer.

    Args:
        run: the layer.
        devices: device types whose autocast modes matter.
        context: modes of the call.
        constants: what it returned beside tensors.
        paths: of the frozen modules that it runs.
        seconds: returns the seconds that a run takes, as far as they are known.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        devices: tuple[str, ...],
        context: Context,
        constants: tuple[Any, ...] = (),
        paths: tuple[str, ...] = (),
        seconds: Callable[[], float] = float,
    ) -> None:
        self.context, self.paths, self.seconds = context, paths, seconds
        self._run, self._devices, self._constants = run, devices, constants

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in these modes.

        Raises:
            CacheError: it returns another constant, so this does not follow from shapes alone.
        """
        context = self.context
        if Context.current(self._devices) == context:
            output = self._run(*args, **kwargs)
        else:
            with contextlib.ExitStack() as modes:
                modes.enter_context(torch.set_grad_enabled(context.grad))
                for device, enabled, dtype in context.autocast:
                    modes.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
                output = self._run(*args, **kwargs)
        if self._constants and (found := constants_of(output)) != self._constants:
            raise CacheError(
                f"a frozen layer returned {found} where it had returned {self._constants} for tensors of the same "
                "shapes. Leave out FrozenPrefixCache"
            )
        return output


def are_fixed(constants: Iterable[Any], tensors: Iterable[Any]) -> bool:
    """Whether constants beside tensors follow from the sizes of tensors, as far as that can be told.

    None and text pass. Whole numbers must be sizes, or the height and width that a size was made of. Others may depend
    on values.

    >>> image, tokens = torch.zeros(2, 3, 32, 32), torch.zeros(2, 64, 5)
    >>> are_fixed([None, "gelu", 8, 8], [image, tokens]), are_fixed([7], [image]), are_fixed([True], [image])
    (True, False, False)
    """
    numbers = [one for one in constants if not isinstance(one, type(None) | str)]
    sizes = {size for tensor in tensors if isinstance(tensor, torch.Tensor) for size in tensor.shape}
    whole = all(type(one) is int for one in numbers)
    return whole and (sizes.issuperset(numbers) or math.prod(numbers) in sizes)


def is_plain(value: Any) -> bool:
    """Whether a value other than a tensor cannot change, so that equal calls with it are the same.

    >>> is_plain(None), is_plain(torch.float32), is_plain(object()), is_plain(torch.nn.Identity())
    (True, True, False, False)
    """
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None
    return isinstance(value, (*PLAIN, types.BuiltinFunctionType))


def constants_of(output: Any) -> tuple[Any, ...]:
    """Return the leaves of an output that are no tensors.

    >>> constants_of((torch.zeros(2), (3, None)))
    (3, None)
    """
    return tuple(leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, torch.Tensor))


def precision_of(node: Node) -> torch.dtype:
    """Return the precision that a unit computed its output in: autocast's where it was on, else the output's dtype."""
    run = node.call.run if node.call is not None else None
    casts = run.context.autocast if isinstance(run, UnitCall) else ()
    here = [dtype for device, enabled, dtype in casts if enabled and device == node.meta.device.type]
    return here[0] if here else node.meta.dtype
