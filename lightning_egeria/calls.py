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
        self.calls: list[NetworkCall] = []
        self._modules = modules
        self._entries = entries
        self._keep = keep
        self._entered = entered
        self._outputs: list[list[Tensor]] = []  # kept alive, or another tensor could take over an id
        self._replacements = ForwardReplacements()

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
            if self._entered is not None and not self.calls:
                self._entered(next(tensor_leaves((args, kwargs)), None))
            earlier = {
                id(tensor): EarlierOutput(call, leaf)
                for call, leaves in enumerate(self._outputs)
                for leaf, tensor in enumerate(leaves)
            }

            def keep(tensor: Tensor) -> Tensor | EarlierOutput:
                return earlier[id(tensor)] if id(tensor) in earlier else self._keep(tensor)

            kept_args, kept_kwargs = apply_to_collection((args, kwargs), Tensor, keep, allow_frozen=True)
            output = original(*args, **kwargs)
            self.calls.append(NetworkCall(entry, kept_args, kept_kwargs))
            self._outputs.append(list(tensor_leaves(output)))
            return output

        return forward


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

        args, kwargs = apply_to_collection((call.args, call.kwargs), Tensor, crop, allow_frozen=True)
        cropped.append(NetworkCall(call.entry, args, kwargs))
    return cropped
