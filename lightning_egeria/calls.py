"""The calls that a training step makes of the network, kept so that they can be made again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_egeria.tracing import Forward, ForwardReplacements, tensor_leaves


class EarlierOutput(NamedTuple):
    """Stands in the arguments of a call for tensor leaf ``leaf`` of the output of call number ``call``."""

    call: int
    leaf: int


@dataclasses.dataclass(frozen=True)
class NetworkCall:
    """One call that the training step made of the network: path of the module and its arguments as they came.

    A tensor that an earlier call gave (an encoder's output, handed to a decoder) is an `EarlierOutput`.
    """

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallRecorder:
    """Keeps the arguments of every call of the chain's entries.

    Args:
        modules: the modules of the network by path.
        entries: paths of those that the training step calls.
        keep: makes of an argument tensor what is kept of it; a copy, because the network may change it in place.
        entered: called with the first tensor among the arguments when the network is first called.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        entries: tuple[str, ...],
        keep: Callable[[Tensor], Tensor],
        entered: Callable[[Tensor | None], None] | None = None,
    ) -> None:
        self._made: list[NetworkCall] = []
        self._failure: Exception | None = None
        self._modules = modules
        self._entries = entries
        self._keep = keep
        self._entered = entered
        self._outputs: list[list[Tensor]] = []  # kept alive, or another tensor could take over an id
        self._replacements = ForwardReplacements()

    @property
    def calls(self) -> list[NetworkCall]:
        """The calls so far.

        Raises:
            Exception: what the user's own class raised when its copy was made.
        """
        if self._failure is not None:
            raise self._failure
        return self._made

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that the calls gave, until `stop`."""
        return [leaf for leaves in self._outputs for leaf in leaves]

    def start(self) -> None:
        """Record from here on."""
        for entry in self._entries:
            self._replacements.replace(self._modules[entry], functools.partial(self._record, entry))

    def stop(self) -> None:
        """Leave the modules as they were. Safe to call twice."""
        self._replacements.restore()
        self._outputs = []

    def _record(self, entry: str, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                call = self._call(entry, args, kwargs)
            except Exception as error:  # the network runs all the same; whoever asks for the calls is told
                self._failure = error
                return original(*args, **kwargs)
            output = original(*args, **kwargs)
            self._made.append(call)
            self._outputs.append(list(tensor_leaves(output)))
            return output

        return forward

    def _call(self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NetworkCall:
        if self._entered is not None and not self._made:
            self._entered(next(tensor_leaves((args, kwargs)), None))
        earlier = {
            id(tensor): EarlierOutput(call, leaf)
            for call, leaves in enumerate(self._outputs)
            for leaf, tensor in enumerate(leaves)
        }

        def keep(tensor: Tensor) -> Tensor | EarlierOutput:
            return earlier[id(tensor)] if id(tensor) in earlier else self._keep(tensor)

        kept_args, kept_kwargs = change_leaves((args, kwargs), Tensor, keep)
        return NetworkCall(entry, kept_args, kept_kwargs)


def change_leaves(value: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """As `apply_to_collection`; what cannot be made anew from its parts, and holds no tensor, stays as it is.

    >>> change_leaves(([1.0, 2], range(3)), float, int)
    ([1, 2], range(0, 3))
    """
    if type(value) in (list, tuple):
        return type(value)(change_leaves(part, kinds, change) for part in value)
    if type(value) is dict:
        return {key: change_leaves(part, kinds, change) for key, part in value.items()}
    try:
        return apply_to_collection(value, kinds, change, allow_frozen=True)
    except Exception:  # classes of the user's own may raise anything
        if next(tensor_leaves(value), None) is not None:
            raise
        return value


def boundary_activation(output: Any, leaf: int) -> Tensor:
    """The tensor leaf number ``leaf`` of a module's output."""
    return list(tensor_leaves(output))[leaf]


def crop_calls(calls: list[NetworkCall], samples: int) -> list[NetworkCall]:
    """The first ``samples`` samples of each argument that has as many entries as the first tensor of its call."""
    cropped = []
    for call in calls:
        sizes = [leaf.shape[0] for leaf in tensor_leaves((call.args, call.kwargs)) if leaf.ndim]

        def crop(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            return tensor[:samples] if tensor.ndim and tensor.shape[0] == sizes[0] else tensor

        args, kwargs = change_leaves((call.args, call.kwargs), Tensor, crop)
        cropped.append(NetworkCall(call.entry, args, kwargs))
    return cropped
