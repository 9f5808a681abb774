"""The network of a snapshot in evaluation mode and a chosen precision, and the Gram matrices at its boundaries."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_egeria.core.batches.tree import change_leaves, tensor_leaves
from lightning_egeria.core.network.calls import EarlierOutput, NetworkCall
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.passing import BoundaryObserver
from lightning_egeria.core.snapshots.packing import copied
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.freezing.int8 import Int8Layers, has_layers
from lightning_egeria.freezing.similarity import gram_matrix
from lightning_egeria.upstream.torch import BatchNorm

Lower = Literal["bf16", "int8"]


class GramRecorder(BoundaryObserver):
    """Computes the Gram matrix of each boundary activation while the network runs.

    Args:
        modules: modules of the network, by path.
        chain: layer chain of the network.
        samples: largest number of samples in a Gram matrix.
        first: index of the first layer module to record.

    Attributes:
        grams: Gram matrix of each boundary, ``[samples, samples]``; None where the network did not reach it.
        batch_size: batch size of the last activation.
    """

    def __init__(self, modules: Mapping[str, nn.Module], chain: LayerChain, samples: int, first: int = 0) -> None:
        super().__init__(modules, chain, first)
        self.samples = samples
        self.grams: list[Tensor | None] = [None] * len(chain)
        self.batch_size = 0

    def boundary_reached(self, index: int, activation: Tensor) -> None:
        """Compute the Gram matrix."""
        self.batch_size = activation.shape[0]
        self.grams[index] = gram_matrix(activation[: self.samples])


class SnapshotNetwork:
    """The network of a snapshot, run eagerly in one precision.

    In ``"bf16"``, weights, buffers and inputs are bfloat16. In ``"int8"``, linear and convolution layers run in int8;
    see `Int8Layers`.

    Args:
        entries: modules that the training step calls, by path; changed in place.
        chain: layer chain of the network.
        samples: largest number of samples in a Gram matrix.
        precision: precision to run in.

    Attributes:
        batch_norms: paths of the batch normalisation modules that were in training mode.

    Raises:
        UnsupportedError: if no layer can run in int8.
    """

    def __init__(
        self,
        entries: Mapping[str, nn.Module],
        chain: LayerChain,
        samples: int,
        precision: Lower | Literal["float32"] = "float32",
    ) -> None:
        self._chain = chain
        self._samples = samples
        self._precision = precision
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._entries = entries
        self._int8: list[Int8Layers] = []
        self._modules = {
            _join(path, inner): module
            for path, entry in entries.items()
            for inner, module in entry.named_modules(remove_duplicate=False)
        }
        self.batch_norms = frozenset(
            path for path, module in self._modules.items() if isinstance(module, BatchNorm) and module.training
        )
        for entry in entries.values():
            entry.requires_grad_(False)
            for part in entry.modules():
                part.training = False
                if isinstance(part, nn.TransformerEncoder):
                    part.use_nested_tensor = False  # nested activations have no axis of samples
            entry.to(self._dtype)
        if precision == "int8":
            self._int8 = [Int8Layers(entry) for entry in entries.values() if has_layers(entry)]
            if not self._int8:
                raise UnsupportedError("the network has no nn.Linear or nn.Conv2d that could run in int8 on the CPU")

    @property
    def runs_in_int8(self) -> bool:
        """Whether some layer has run in int8."""
        return any(layers.ran for layers in self._int8)

    @property
    def fallback(self) -> str | None:
        """Which layers ran in float32 instead of int8, and why; None if there are none."""
        return next((text for layers in self._int8 if (text := layers.describe()) is not None), None)

    def lowered(self, precision: Lower) -> SnapshotNetwork:
        """Return a copy in a lower precision.

        Raises:
            UnsupportedError: if no layer can run in int8.
        """
        entries = copied(self._entries)
        if precision == "bf16":  # the int8 kernels order channels themselves
            for entry in entries.values():
                entry.to(memory_format=torch.channels_last)
        return SnapshotNetwork(entries, self._chain, self._samples, precision)

    @torch.no_grad()
    def boundary_grams(
        self, calls: list[NetworkCall], first: int = 0, by_batch: Collection[str] = ()
    ) -> tuple[list[Tensor | None], int]:
        """Run the network and return the Gram matrix of each boundary activation, and the batch size.

        Args:
            calls: calls to make.
            first: index of the first layer module to measure.
            by_batch: paths of batch normalisation modules that use the statistics of the batch, as in training, instead
                of their running statistics.

        Returns:
            A matrix ``[samples, samples]`` per layer module, None where not measured; and the number of samples in.
        """
        recorder = GramRecorder(self._modules, self._chain, self._samples, first)
        recorder.start()
        try:
            self.outputs(calls, by_batch)
        finally:
            recorder.stop()
        return recorder.grams, recorder.batch_size

    @torch.no_grad()
    def outputs(self, calls: list[NetworkCall], by_batch: Collection[str] = ()) -> list[list[Tensor]]:
        """Run the network and return the tensors that each call returned; arguments as of `boundary_grams`."""
        outputs: list[list[Tensor]] = []

        def prepare(value: Any) -> Any:
            if isinstance(value, EarlierOutput):
                return outputs[value.call][value.leaf]
            # A copy, because the network may change its input in place and runs on it several times.
            return value.to(self._dtype if value.is_floating_point() else value.dtype, copy=True)

        fast_path = torch.backends.mha.get_fastpath_enabled()
        try:
            # The fast path reads the weights of nn.TransformerEncoderLayer directly and would bypass int8.
            torch.backends.mha.set_fastpath_enabled(fast_path and self._precision != "int8")
            with torch.random.fork_rng(self._cuda_devices()), self._normalising_by_batch(by_batch):
                for call in calls:
                    args, kwargs = change_leaves((call.args, call.kwargs), (Tensor, EarlierOutput), prepare)
                    outputs.append(list(tensor_leaves(self._entries[call.entry](*args, **kwargs))))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
        return outputs

    @contextlib.contextmanager
    def _normalising_by_batch(self, paths: Collection[str]) -> Iterator[None]:
        found = {self._modules[path] for path in paths if path in self._modules}
        kept = [(m, m.running_mean, m.running_var) for m in found if isinstance(m, BatchNorm)]
        try:
            for module, *_ in kept:
                module.running_mean = module.running_var = None
            yield
        finally:
            for module, mean, variance in kept:
                module.running_mean, module.running_var = mean, variance

    def _cuda_devices(self) -> list[torch.device]:
        devices = {tensor.device for entry in self._entries.values() for tensor in entry.parameters()}
        return [device for device in devices if device.type == "cuda"]


def _join(path: str, inner: str) -> str:
    return f"{path}.{inner}" if path and inner else path or inner
