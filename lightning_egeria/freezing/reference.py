"""The reference model: a snapshot of the network, run on the inputs that the network in training has just seen."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.layers import LayerChain
from lightning_egeria.tracing import Forward, ForwardReplacements, tensor_leaves


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the calling thread; the future that it returns is already done."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run ``fn(*args, **kwargs)`` now; an exception is kept in the future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # whatever the user's modules raise belongs to the one who reads the result
            future.set_exception(error)
        return future


@dataclasses.dataclass
class NetworkCall:
    """One call that the training step made of the network: the arguments as they came, and the result.

    ``output`` is kept to recognise it among the arguments of a later call (an encoder's output given to a decoder).
    """

    entry: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class BoundaryRecorder:
    """Takes the Gram matrix of each boundary activation of a chain while its network runs.

    Args:
        modules: the modules of the network by path.
        chain: names the boundaries.
        samples: Gram matrices are made of the first ``samples`` samples of a batch at most.
        first: index of the first layer module to record.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, samples: int, first: int = 0) -> None:
        self.modules = modules
        self.chain = chain
        self.samples = samples
        self.first = first
        self.grams: list[Tensor | None] = [None] * len(chain)
        self.batch_size = 0
        self._replacements = ForwardReplacements()

    def start(self) -> None:
        """Record from here on."""
        for index in range(self.first, len(self.chain)):
            module = self.modules[self.chain.layer_modules[index].boundary]
            self._replacements.replace(module, functools.partial(self._record, index))

    def stop(self) -> None:
        """Leave the modules as they were. Safe to call twice."""
        self._replacements.restore()

    def _record(self, index: int, original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            self.boundary_reached(index, boundary_activation(output, self.chain.layer_modules[index].output_leaf))
            return output

        return forward

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Called with the boundary activation of layer module ``index`` as soon as it is there."""
        self.batch_size = activation.shape[0]
        self.grams[index] = gram_matrix(activation[: self.samples])


def boundary_activation(output: Any, leaf: int) -> Tensor:
    """The tensor leaf number ``leaf`` of a module's output."""
    return list(tensor_leaves(output))[leaf]


class ReferenceModel:
    """A copy of the network with the weights of one moment, in evaluation mode.

    Args:
        module: the model in training; it is copied where the chain's entries are, and never touched.
        chain: its layer chain.
        samples: how many samples of a batch are compared at most.
    """

    def __init__(self, module: nn.Module, chain: LayerChain, samples: int) -> None:
        self._chain = chain
        self._samples = samples
        self._crops: bool | None = None
        self._entries = _copy_entries(module, chain.entries)

    @torch.no_grad()
    def refresh(self, module: nn.Module) -> None:
        """Take over the weights and buffers that ``module`` has now."""
        for path, entry in self._entries.items():
            source = module.get_submodule(path)
            for target, value in zip(_tensors(entry), _tensors(source), strict=True):
                target.copy_(value)

    def boundary_grams(self, calls: list[NetworkCall]) -> list[Tensor | None]:
        """Gram matrix of each boundary activation for these inputs, shape ``[samples, samples]`` each.

        Only as many samples as are compared go through the network, if a first trial shows that the others make no
        difference to them.
        """
        if self._crops is None:
            full, batch_size = self._run(calls)
            self._crops = batch_size > self._samples and self._cropping_is_safe(calls, full)
            return full
        if self._crops:
            calls = _crop(calls, self._samples)
        return self._run(calls)[0]

    def _cropping_is_safe(self, calls: list[NetworkCall], full: list[Tensor | None]) -> bool:
        if len(calls) > 1:
            return False
        try:
            cropped, _ = self._run(_crop(calls, self._samples))
        except Exception:  # a network that cannot take a smaller batch may raise anything; the whole batch works
            return False
        return all(
            a is not None and b is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
            for a, b in zip(full, cropped, strict=True)
        )

    def _run(self, calls: list[NetworkCall]) -> tuple[list[Tensor | None], int]:
        modules = {
            _join(path, inner): module
            for path, entry in self._entries.items()
            for inner, module in entry.named_modules(remove_duplicate=False)
        }
        recorder = BoundaryRecorder(modules, self._chain, self._samples)
        devices = {t.device for entry in self._entries.values() for t in _tensors(entry)}
        replaced: dict[int, Tensor] = {}
        recorder.start()
        try:
            with torch.no_grad(), torch.random.fork_rng([d for d in devices if d.type == "cuda"]):
                for call in calls:
                    args, kwargs = apply_to_collection(
                        (call.args, call.kwargs), Tensor, lambda tensor: replaced.get(id(tensor), tensor)
                    )
                    output = self._entries[call.entry](*args, **kwargs)
                    for before, after in zip(tensor_leaves(call.output), tensor_leaves(output), strict=False):
                        replaced[id(before)] = after
        finally:
            recorder.stop()
        return recorder.grams, recorder.batch_size


def _copy_entries(module: nn.Module, entries: tuple[str, ...]) -> dict[str, nn.Module]:
    originals = {path: module.get_submodule(path) for path in entries}
    memo: dict[int, Any] = {}
    for original in originals.values():
        for part in original.modules():
            for value in vars(part).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    memo[id(value)] = value.detach().clone()  # an activation kept on the module refuses to be copied
    copies: dict[str, nn.Module] = copy.deepcopy(originals, memo)
    for entry in copies.values():
        entry.requires_grad_(False)
        for part in entry.modules():
            part.training = False
    return copies


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _join(path: str, inner: str) -> str:
    return f"{path}.{inner}" if path and inner else path or inner


def _crop(calls: list[NetworkCall], samples: int) -> list[NetworkCall]:
    """The first samples of each argument that has as many entries as the first tensor among them."""
    cropped = []
    for call in calls:
        sizes = [leaf.shape[0] for leaf in tensor_leaves((call.args, call.kwargs)) if leaf.ndim]

        def crop(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            return tensor[:samples] if tensor.ndim and tensor.shape[0] == sizes[0] else tensor

        args, kwargs = apply_to_collection((call.args, call.kwargs), Tensor, crop)
        cropped.append(NetworkCall(call.entry, args, kwargs, call.output))
    return cropped
