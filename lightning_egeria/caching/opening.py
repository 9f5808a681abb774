"""What the activations at a boundary are cached in: what names its store, and how much room it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence

import torch

from lightning_egeria.caching.bypass import PrefixBypass
from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.findings import Findings, layers_of
from lightning_egeria.caching.levels import Level, MemoryTier, RowForm
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.made import DIGEST_BYTES
from lightning_egeria.caching.recording import Limits
from lightning_egeria.caching.steps import Step
from lightning_egeria.caching.store import FORMAT, Manifest
from lightning_egeria.caching.terms import Terms
from lightning_egeria.caching.weights import PrefixWeights
from lightning_egeria.errors import CacheError
from lightning_egeria.network.compilation import is_compiled
from lightning_egeria.network.prefix import FrozenPrefix

FIELD_SLACK = 2  # encoded fields may be so many times as long as the longest that was seen first
LENGTH_SLACK = 4  # samples may be so many times as long as the longest that was seen first


class Cut:
    """The boundary that is to be cached, or is.

    Args:
        prefix: frozen at least that far.
        depth: of the boundary.
        device: that the network is on.

    Attributes:
        bypass: of what is in front of it.
        weights: of that.
        compiled: whether the network is.
        examinations: how many batches have shown nothing.
        findings: of the batch that was examined.
        terms: on which activations stand for the prefix; None: not examined yet.
        autocast: that they were computed in.
    """

    def __init__(self, prefix: FrozenPrefix, depth: int, device: torch.device) -> None:
        self.prefix, self.depth, self.device = prefix, depth, device
        self.compiled = is_compiled(prefix.module)
        self.bypass = PrefixBypass(prefix.module, prefix.chain, depth, self.compiled)
        self.weights = PrefixWeights(prefix, depth, self.bypass.units)
        self.examinations = 0
        self.findings: Findings | None = None
        self.terms: Terms | None = None
        self.autocast: tuple[str, torch.dtype] | None = None

    @property
    def boundary(self) -> str:
        """Its name."""
        return self.prefix.chain.layer_modules[self.depth - 1].boundary


@dataclasses.dataclass(frozen=True)
class Opened:
    """A level that was opened, and what there is to say of it.

    Attributes:
        level: the cached activations.
        lengths: of the samples of the step that was examined; None where all are alike.
        text: where it is and how much it takes.
    """

    level: Level
    lengths: Sequence[int] | None
    text: str


class LevelMaker:
    """Opens what activations are cached in.

    Args:
        dataset: the user's, behind plans.
        directory: where stores are.
        limits: of room.
        views: how many variants of each sample are cached; 0: samples are loaded as they come.
        seed: of their randomness.
    """

    def __init__(
        self, dataset: PlannedDataset, directory: CacheDirectory, limits: Limits, views: int, seed: int
    ) -> None:
        self._dataset, self._directory, self._limits = dataset, directory, limits
        self._views, self._seed = views, seed

    def fingerprint(self, cut: Cut, form: RowForm, terms: Terms) -> str:
        """Names everything that the entries depend on, in hexadecimal digits."""
        if cut.findings is None:
            raise RuntimeError("there is nothing to cache")
        device = cut.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
        modules = dict(cut.prefix.module.named_modules())
        parts = [
            str(FORMAT),
            torch.__version__,
            device.type,
            name,
            str(cut.autocast),
            str(form),
            cut.findings.fingerprint,
            str(self._views),
            str(self._seed if self._views else 0),
            str(terms.input_field is not None),
            str(terms.made),
            str(cut.compiled),
        ]
        parts += [f"{unit}: {modules[unit]!r}" for unit in cut.bypass.units]
        parts.append(repr(cut.prefix.chain.layer_modules[cut.depth - 1].output_leaf))
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(part.encode() + b"\0")
        digest.update(cut.weights.digest())
        return digest.hexdigest()

    def open(self, cut: Cut, step: Step, form: RowForm, terms: Terms, fingerprint: str) -> Opened:
        """A level for what the step has computed at the boundary.

        Raises:
            StoreError: the store cannot be read or written.
        """
        if cut.findings is None:
            raise RuntimeError("there is nothing to cache")
        entries = len(self._dataset) * max(1, self._views)
        lengths = step.loaded.lengths or _lengths_of(cut.findings, terms)
        longest = LENGTH_SLACK * max(lengths) if lengths else 1
        field_bytes = DIGEST_BYTES if terms.made.numbers else 0
        if terms.input_field is not None:
            field_bytes = max(64, FIELD_SLACK * terms.input_field.other_bytes)
        manifest = Manifest(
            fingerprint,
            entries,
            longest * form.piece_bytes,
            field_bytes,
            str(form.dtype),
            form.order,
            self._about(cut, form),
        )
        pieces = sum(lengths) / len(lengths) if lengths else 1
        row_bytes = int(pieces * form.piece_bytes + field_bytes / FIELD_SLACK + manifest.header_bytes)
        size = entries * row_bytes
        store, room = self._directory.open(manifest, size, self._limits.max_bytes, self._limits.min_free_bytes)
        digests = bool(terms.made.numbers)
        host = MemoryTier(self._limits.host_bytes, form, entries, torch.device("cpu"), digests)
        device_bytes = self._limits.device_bytes if cut.device.type != "cpu" else 0
        device = MemoryTier(device_bytes, form, entries, cut.device, digests)
        is_found = bool(store.index.any())
        doubtful = store.index.copy() if terms.input_field is not None and is_found else None
        share = "" if size <= room else f", of which {room / size:.0%} fit"
        text = (
            f"the outputs of {cut.boundary!r} will take about {size / 1e9:.2f} GB in {store.folder} "
            f"({entries} entries of {row_bytes} bytes){share}"
        )
        level = Level(cut.depth, form, store, host, device, doubtful, terms.made, is_found)
        return Opened(level, lengths, text)

    def taken_by_others(self, levels: Sequence[Level]) -> int:
        """Bytes of the stores in the directory that are not of these levels."""
        own = {level.store.folder for level in levels}
        with contextlib.suppress(CacheError):  # nobody may read it any longer
            return sum(one.bytes_on_disk for one in self._directory.summaries() if one.folder not in own)
        return 0

    def _about(self, cut: Cut, form: RowForm) -> dict[str, str]:
        return {
            "model": type(cut.prefix.module).__name__,
            "boundary": cut.boundary,
            "data": " of ".join(type(layer).__name__ for layer in layers_of(self._dataset.dataset)),
            "samples": str(len(self._dataset)),
            "augmentation_views": str(self._views),
            "row": f"{'x'.join(['positions'] * form.ragged + list(map(str, form.piece)))} {form.dtype}",
        }


def _lengths_of(findings: Findings, terms: Terms) -> tuple[int, ...] | None:
    """Of the samples of the batch that was examined."""
    return next((field.lengths for field in findings.varying if field.sample_leaf == terms.length_leaf), None)
