"""A network in a lower precision, for measuring only: it runs without gradients and in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_egeria.calls import EarlierOutput, NetworkCall, change_leaves
from lightning_egeria.freezing.int8 import Int8Layers
from lightning_egeria.freezing.parcels import pack, unpack
from lightning_egeria.freezing.recording import BoundaryRecorder
from lightning_egeria.layers import LayerChain
from lightning_egeria.tracing import tensor_leaves

Lower = Literal["bf16", "int8"]


class SnapshotNetwork:
    """The network of a snapshot, run eagerly in one precision.

    In ``"bf16"`` weights, buffers and inputs are bfloat16; in ``"int8"`` the linear and convolution layers are; see
    `Int8Layers`.

    Args:
        entries: the modules that the training step calls, by path; changed in place.
        chain: names the boundaries.
        samples: Gram matrices are made of the first ``samples`` samples at most.
        precision: to run in.

    Attributes:
        batch_norms: paths of the batch normalisation that was in training mode.

    Raises:
        UnsupportedError: nothing of it can run in int8.
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
        self._modules = {
            _join(path, inner): module
            for path, entry in entries.items()
            for inner, module in entry.named_modules(remove_duplicate=False)
        }
        self.batch_norms = frozenset(
            path for path, module in self._modules.items() if isinstance(module, _BatchNorm) and module.training
        )
        for entry in entries.values():
            entry.requires_grad_(False)
            for part in entry.modules():
                part.training = False
                if isinstance(part, nn.TransformerEncoder):
                    part.use_nested_tensor = False  # activations in it would have no axis of samples any longer
            entry.to(self._dtype)
        if precision == "int8":
            Int8Layers(nn.ModuleList(entries.values()))

    def lowered(self, precision: Lower) -> SnapshotNetwork:
        """A copy of it in a lower precision.

        Raises:
            UnsupportedError: nothing of it can run in int8.
        """
        # Not by deepcopy: a function in the place of a forward would go on with the modules of the original.
        entries = unpack(pack(self._entries).to_host())
        if precision == "bf16":  # int8 has its own way with the channels
            for entry in entries.values():
                entry.to(memory_format=torch.channels_last)
        return SnapshotNetwork(entries, self._chain, self._samples, precision)

    @torch.no_grad()
    def boundary_grams(
        self, calls: list[NetworkCall], first: int = 0, by_batch: Collection[str] = ()
    ) -> tuple[list[Tensor | None], int]:
        """Gram matrix of each boundary activation, ``[samples, samples]`` each, and how many samples came in.

        Those of layer modules before number ``first`` are left out. Batch normalisation whose path is in ``by_batch``
        takes the statistics of what it is given, as in training, and not those that it has been keeping.
        """
        recorder = BoundaryRecorder(self._modules, self._chain, self._samples, first)
        outputs: list[list[Tensor]] = []

        def prepare(value: Any) -> Any:
            if isinstance(value, EarlierOutput):
                return outputs[value.call][value.leaf]
            # A copy, because the network may change its input in place and is run on it several times.
            return value.to(self._dtype if value.is_floating_point() else value.dtype, copy=True)

        fast_path = torch.backends.mha.get_fastpath_enabled()
        recorder.start()
        try:
            # It reads the weights of nn.TransformerEncoderLayer past the layers that would run in int8.
            torch.backends.mha.set_fastpath_enabled(fast_path and self._precision != "int8")
            with torch.random.fork_rng(self._cuda_devices()), self._normalising_by_batch(by_batch):
                for call in calls:
                    args, kwargs = change_leaves((call.args, call.kwargs), (Tensor, EarlierOutput), prepare)
                    outputs.append(list(tensor_leaves(self._entries[call.entry](*args, **kwargs))))
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            recorder.stop()
        return recorder.grams, recorder.batch_size

    @contextlib.contextmanager
    def _normalising_by_batch(self, paths: Collection[str]) -> Iterator[None]:
        found = {self._modules[path] for path in paths if path in self._modules}
        kept = [(m, m.running_mean, m.running_var) for m in found if isinstance(m, _BatchNorm)]
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
