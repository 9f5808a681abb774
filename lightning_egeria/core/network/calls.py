"""Recording the calls that a training step makes to the network, to repeat them later."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_egeria.core.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.core.network.forwards import Forward, ForwardReplacements


class EarlierOutput(NamedTuple):
    """Placeholder in the arguments of a call for tensor leaf ``leaf`` of the output of call number ``call``."""

    call: int
    leaf: int


@dataclasses.dataclass(frozen=True)
class NetworkCall:
    """One call that the training step made to the network.

    Attributes:
        entry: path of the called module.
        args: positional arguments. A tensor that an earlier call returned (an encoder's output, passed to a decoder)
            is an `EarlierOutput`.
        kwargs: keyword arguments, likewise.
    """

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallRecorder:
    """Records the arguments of every call to the chain's entries.

    Args:
        modules: modules of the network, by path.
        entries: paths of the modules that the training step calls.
        keep: maps an argument tensor to the copy to keep; the network may change the original in place.
        entered: called at the first call to the network, with the first tensor among its arguments.
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
            Exception: if copying an argument failed, as a user's class may.
        """
        if self._failure is not None:
            raise self._failure
        return self._made

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that the calls returned; empty after `stop`."""
        return [leaf for leaves in self._outputs for leaf in leaves]

    def start(self) -> None:
        """Start recording."""
        for entry in self._entries:
            self._replacements.replace(self._modules[entry], functools.partial(self._record, entry))

    def stop(self) -> None:
        """Restore the modules. Safe to call twice."""
        self._replacements.restore()
        self._outputs = []

    def _record(self, entry: str, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                call = self._call(entry, args, kwargs)
            except Exception as error:  # the network still runs; `calls` raises the error
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


def boundary_activation(output: Any, leaf: int) -> Tensor:
    """Return tensor leaf number ``leaf`` of a module's output."""
    return list(tensor_leaves(output))[leaf]


def crop_calls(calls: list[NetworkCall], samples: int) -> list[NetworkCall]:
    """Cut each argument to its first ``samples`` samples, if its length equals that of the call's first tensor."""
    cropped = []
    for call in calls:
        sizes = [leaf.shape[0] for leaf in tensor_leaves((call.args, call.kwargs)) if leaf.ndim]

        def crop(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            return tensor[:samples] if tensor.ndim and tensor.shape[0] == sizes[0] else tensor

        args, kwargs = change_leaves((call.args, call.kwargs), Tensor, crop)
        cropped.append(NetworkCall(call.entry, args, kwargs))
    return cropped
