"""The weights of a frozen prefix, watched for changes that nobody announced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_egeria.caching.samples import bits_of, bytes_of
from lightning_egeria.network.prefix import FrozenPrefix

_SAMPLED = 3  # values of each tensor


class PrefixWeights:
    """Parameters and buffers of the part of a prefix that is left out.

    Args:
        prefix: that is frozen.
        cut: depth of the boundary.
        units: paths of the modules that are left out.
    """

    def __init__(self, prefix: FrozenPrefix, cut: int, units: Iterable[str]) -> None:
        modules = dict(prefix.module.named_modules())
        names = set(prefix.chain.prefix_parameters(cut))
        found: list[Tensor] = [parameter for name, parameter in prefix.module.named_parameters() if name in names]
        for unit in units:
            found += [*modules[unit].parameters(), *modules[unit].buffers()]
        self._tensors = list({id(tensor): tensor for tensor in found}.values())
        dense = torch.ops.aten.is_non_overlapping_and_dense
        self._samples = [
            bits_of(tensor.detach().as_strided((tensor.numel(),), (1,))).numpy()[:: max(1, tensor.numel() // _SAMPLED)]
            for tensor in self._tensors
            if tensor.device.type == "cpu" and dense(tensor)
        ]
        self._marks = self._current_marks()
        self._digest = self.digest()

    def have_changed(self) -> bool:
        """Whether a value is another than at the beginning. Reads all values only where something was written.

        A write through ``tensor.data`` leaves no trace: on the CPU it is found by some values of each tensor.
        """
        marks = self._current_marks()
        if marks == self._marks:
            return False
        changed = self.digest() != self._digest
        self._marks = marks
        return changed

    def digest(self) -> bytes:
        """A checksum of all values."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._tensors:
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(bytes_of(tensor))
        return digest.digest()

    def _current_marks(self) -> tuple[list[int], list[int], list[bytes]]:
        versions = [tensor._version for tensor in self._tensors]  # which rise with each change in place
        places = [tensor.data_ptr() for tensor in self._tensors]
        return versions, places, [values.tobytes() for values in self._samples]
