"""What entries depend on: two runs share a store only if all of it is the same."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.levels import RowForm
from lightning_egeria.caching.manifest import FORMAT, Manifest


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the entries of one boundary are computed from.

    Attributes:
        loader: ``"training"`` or the name of a validation loader.
        data: class of the dataset.
        samples: number of its samples.
        structure: structure of a sample.
        views: variants of each sample.
        seed: seed of the views.
        run: text that no other run has, where entries are of use in one run only; else empty.
        computation: how the front and the program make rows of samples.
        batch_size: size of the batch; rows of others may differ in their last bits.
        front: the frozen front.
    """

    loader: str
    data: type
    samples: int
    structure: Any
    views: int
    seed: int
    run: str
    computation: str
    batch_size: int
    front: Front

    def manifest(self, form: RowForm, field_bytes: int) -> Manifest:
        """Return the manifest of a store for rows of a form, with encoded fields of at most so many bytes."""
        about = {
            "model": type(self.front.prefix.module).__name__,
            "boundary": self.front.units[-1].path,
            "data": self.data.__name__,
            "samples": str(self.samples),
            "loader": self.loader,
            "augmentation_views": str(self.views),
            "row": f"{'x'.join(map(str, form.shape))} {form.dtype}",
        }
        entries = self.samples * max(1, self.views)
        return Manifest(
            self._fingerprint(form), entries, form.row_bytes, field_bytes, str(form.dtype), form.order, about
        )

    def _fingerprint(self, form: RowForm) -> str:
        """Name everything that the entries depend on, in hexadecimal digits."""
        device = self.front.device
        parts = [
            str(FORMAT),
            torch.__version__,
            torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability(),
            torch.get_float32_matmul_precision(),
            str(form),
            str(self.views),
            str(self.seed if self.views else 0),
            str(self.batch_size),
            f"{self.data.__qualname__} {self.samples} {self.structure!r}",
            self.run,
            self.computation,
        ]
        state = hashlib.blake2b(digest_size=16)
        for part in parts:
            state.update(part.encode() + b"\0")
        state.update(self.front.state.digest)
        return state.hexdigest()
