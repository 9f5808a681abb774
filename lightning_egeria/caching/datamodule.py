"""The Lightning side of the cache: a data module around the user's own."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from rich import filesize
from torch.utils.data import DataLoader

from lightning_egeria.caching import METHOD
from lightning_egeria.caching.loader import Line, why_not
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.session import CacheSession
from lightning_egeria.caching.stats import NOTHING_FROZEN, CacheStats, add_saved, spending
from lightning_egeria.caching.store.directory import CacheDirectory, default_cache_dir
from lightning_egeria.caching.store.limits import Budget, Limits
from lightning_egeria.caching.store.rows import Precision
from lightning_egeria.caching.stream import Stream
from lightning_egeria.core.network.sharding import holds_shards
from lightning_egeria.core.training.methods import check_combination, methods_of
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.progress import BarEntry
from lightning_egeria.core.training.wrapping import WrappingDataModule
from lightning_egeria.errors import ArgumentError, CacheError, check_integers
from lightning_egeria.upstream.lightning import is_asked_by_loop, prepared


class FrozenPrefixCache(WrappingDataModule):
    """Trains from cached outputs of frozen modules, whatever has frozen them.

    Modules are frozen if none of their parameters trains: a backbone with ``requires_grad_(False)``, the layers that
    `KnowledgeGuidedFreezing` or another callback has frozen so far, the base layers of PEFT. Where nothing is frozen,
    and wherever caching would change training, batches are the user's own. Other attributes are read from the user's
    data module, and set on it.

    Args:
        datamodule: the user's own, or just the training DataLoader.
        cache_dir: folder for entries; later runs find them there, and several runs may share it. None is
            ``lightning_egeria`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``), and entries are
            removed at the end of `fit`.
        max_bytes: largest size of all stores in ``cache_dir``; None is half of the space that is free at the start.
        min_free_bytes: space to leave free on that disk.
        host_bytes: host memory for entries of training and validation together, besides the disk.
        device_bytes: GPU memory for entries, besides the disk.
        entry_precision: ``"bf16"`` or ``"int8"`` keeps entries in fewer bits. Outputs of frozen layers are then
            rounded in all steps from the first entry on, so training differs from that without the cache. None keeps
            entries as they are.
        augmentation_views: with random augmentation, how many variants of each sample to keep: in epoch ``e``, all
            randomness of a sample is a function of ``seed``, the sample and ``e % augmentation_views``, from the first
            freeze on. 0: samples are loaded as they come, and random augmentation turns the cache off.
        seed: seed of the variants.
        val_dataloaders: for validation, if ``datamodule`` is a DataLoader.

    Attributes:
        datamodule: the user's own.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD

    def __init__(
        self,
        datamodule: pl.LightningDataModule | DataLoader[Any] | None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        min_free_bytes: int = 2 * 10**9,
        host_bytes: int = 10**9,
        device_bytes: int = 0,
        entry_precision: Precision | None = None,
        augmentation_views: int = 0,
        seed: int = 0,
        val_dataloaders: Any = None,
    ) -> None:
        super().__init__()
        check_integers(0, max_bytes=0 if max_bytes is None else max_bytes, min_free_bytes=min_free_bytes)
        check_integers(0, host_bytes=host_bytes, device_bytes=device_bytes)
        check_integers(0, augmentation_views=augmentation_views, seed=seed)
        if entry_precision not in (None, *get_args(Precision)):
            known = ", ".join(map(repr, get_args(Precision)))
            raise ArgumentError(f"entry_precision must be {known} or None, got {entry_precision!r}")
        if not isinstance(cache_dir, (str, os.PathLike, type(None))):
            raise ArgumentError(
                f"cache_dir must be the path of a folder, got {type(cache_dir).__name__}. Pass a loader for validation "
                "as val_dataloaders=..."
            )
        self._is_temporary = cache_dir is None
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self.host_bytes = host_bytes
        self.device_bytes = device_bytes
        self.entry_precision = entry_precision
        self.augmentation_views = augmentation_views
        self.seed = seed
        self._notices = Notices("cache")
        self._cache: CacheSession | None = None
        self._host = Budget(0)  # of a `fit`
        self._directory: CacheDirectory | None = None
        self._bar_entry: BarEntry | None = None
        self._stats = CacheStats(off="fit has not begun")
        self._validation_stats = CacheStats(off="fit has not begun")
        self.wrap(datamodule, val_dataloaders, {"val_dataloader": self._val_dataloader})

    @property
    def stats(self) -> CacheStats:
        """What the cache has done in training, in the last fit so far."""
        if self._cache is not None:
            self._cache.measure_disk()
        return self._stats

    @property
    def validation_stats(self) -> CacheStats:
        """What the cache has done in validation, in the last fit so far."""
        return self._validation_stats

    def setup(self, stage: str) -> None:
        """Set up the user's data module, and begin the cache."""
        super().setup(stage)
        if stage == "fit":
            started = time.perf_counter()
            check_combination(methods_of(self.trainer))
            self._close()
            reason = self._reason_against()
            if reason is None:
                try:
                    self._directory = CacheDirectory(self.cache_dir)
                except CacheError as error:
                    reason = str(error)
            if reason is not None:
                self._turn_off(reason)
            elif self.trainer is not None:
                self._cache, self._host = CacheSession(self.trainer, self._notices), Budget(self.host_bytes)
                self._stats, self._validation_stats = CacheStats(), CacheStats()
                add_saved(self._stats, started - time.perf_counter())
                atexit.register(self._close)  # for a callback that raises in `on_exception`

    def train_dataloader(self) -> Any:
        """Return the user's DataLoader, with a plan behind each batch if it can have one."""
        loader = self.datamodule.train_dataloader()
        model = getattr(self.trainer, "lightning_module", None)
        if self._cache is not None and model is not None and holds_shards(model):  # only now, not in `setup`
            self._close()
            self._turn_off(METHOD.strategy_reasons["ModelParallelStrategy"])
        if self._cache is None or not is_asked_by_loop():
            return loader
        with spending(self._stats):
            return self._line("training", loader)

    def _val_dataloader(self) -> Any:
        """Return the user's validation loaders, with plans behind their batches."""
        loaders = self.datamodule.val_dataloader()
        fits = getattr(getattr(self.trainer, "state", None), "fn", None) == TrainerFn.FITTING
        if self._cache is None or not fits or not is_asked_by_loop():
            return loaders
        with spending(self._validation_stats):
            if isinstance(loaders, (list, tuple)):
                return [self._line(f"validation {at}", loader) for at, loader in enumerate(loaders)]
            return self._line("validation", loaders)

    def _line(self, name: str, loader: Any) -> Any:
        cache, directory, training = self._cache, self._directory, name == "training"
        stats = self._stats if training else self._validation_stats
        model: Any = getattr(self.trainer, "lightning_module", None)
        reason = why_not(loader, model.training_step if training else model.validation_step)
        if cache is None or directory is None or reason is not None:
            stats.off = reason
            tell = self._notices.warn if training else self._notices.inform
            tell(f"the cache of {name} is off: {reason}", once=f"{name} {reason}")
            return loader
        loader = prepared(self.trainer, loader, training)  # with several processes, the loader of this one
        max_bytes = self.max_bytes if self.max_bytes is not None else directory.half_of_the_disk()
        device_bytes = self.device_bytes if training else 0
        limits = Limits(max_bytes, self.min_free_bytes, self._host, device_bytes, self.entry_precision)
        views, observes = (self.augmentation_views, cache.will_compare) if training else (0, lambda _: False)

        def make_stream(dataset: PlannedDataset, load: Any) -> Stream:
            stays = not self._is_temporary
            return Stream(
                name, dataset, directory, limits, views, self.seed, observes, load, self._notices, stats, stays
            )

        arrived = cache.arrived_for_training if training else cache.arrived_for_validation
        line = cache.lines.get(name)
        if line is None or not line.goes_on_with(loader):
            epochs = self._epochs if training else self._passes()
            line = Line(loader, make_stream, epochs, arrived, lambda: cache.begins(name), cache.looking)
            cache.add(name, line)
        if training:
            if self._bar_entry is not None:
                self._bar_entry.remove()
            self._bar_entry = BarEntry(self.trainer, "cached", line.stream.progress_text)
        return line.loader

    def _epochs(self, once: bool) -> tuple[int, int | None]:
        epochs = getattr(self.trainer, "max_epochs", None) or -1
        return self.trainer.current_epoch if self.trainer is not None else 0, epochs if epochs > 0 and once else None

    def _passes(self) -> Callable[[bool], tuple[int, int | None]]:
        """Return what tells the number of a pass over validation data, and of all passes; None if that is not known."""
        count = itertools.count()

        def passes(once: bool) -> tuple[int, int | None]:
            trainer: Any = self.trainer
            if trainer.sanity_checking:
                return 0, None
            epochs, every = getattr(trainer, "max_epochs", None) or -1, trainer.check_val_every_n_epoch or 0
            known = once and epochs > 0 and every > 0 and trainer.val_check_interval == 1.0
            number = next(count)
            left = epochs // every - trainer.current_epoch // every if known else 0
            return number, number + left if known else None

        return passes

    def _turn_off(self, reason: str) -> None:
        self._stats, self._validation_stats = CacheStats(off=reason), CacheStats(off=reason)
        if not getattr(self.trainer, "fast_dev_run", False):
            self._notices.warn(f"the cache of the frozen layers is off: {reason}", once=reason)

    def invalidate(self, ids: Iterable[int] | None = None) -> None:
        """Compare samples with their entries before these are used again, because the data changed.

        Changes of the dataset's own attributes are seen at the start of an epoch. Call this after a change that cannot
        be seen there, such as a file that was rewritten.

        Args:
            ids: indices of the samples; None for all.
        """
        if self._cache is not None:
            self._cache.forget_verified(ids)

    def teardown(self, stage: str) -> None:
        """As the user's, and the end of the cache."""
        if stage == "fit":
            self._close()
            self._tell_the_end()
        super().teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """As the user's; Lightning does not call `teardown` after an error."""
        self._close()
        super().on_exception(exception)

    def _reason_against(self) -> str | None:
        if getattr(self.trainer, "overfit_batches", 0):
            return "overfit_batches replaces the sampler"
        if getattr(self.trainer, "fast_dev_run", False):
            return "fast_dev_run"
        return None

    def _tell_the_end(self) -> None:
        freezes = any(method.freezes for method in methods_of(self.trainer))
        if self._stats.off == NOTHING_FROZEN and not self._stats.misses and not freezes:
            self._notices.inform(
                "nothing was cached, because no module is frozen. Call requires_grad_(False) and eval() on the modules "
                "that need no training, or add KnowledgeGuidedFreezing() to the callbacks"
            )
        for name, stats in (("training", self._stats), ("validation", self._validation_stats)):
            served = stats.hits + stats.advanced
            if served + stats.misses:
                others = f"{stats.unused} entries were rejected because the frozen layers got other inputs; "
                seconds, size = stats.seconds_saved, filesize.decimal(stats.bytes_on_disk)
                saved = f"about {seconds:.1f} s saved" if seconds >= 0 else f"it cost about {-seconds:.1f} s"
                self._notices.inform(
                    f"{name}: {served} of {served + stats.misses} samples came from the cache, {stats.not_loaded} of "
                    f"them without loading; {others if stats.unused else ''}{saved}; {size} in {self.cache_dir}"
                )

    def _close(self) -> None:
        atexit.unregister(self._close)
        if self._bar_entry is not None:
            self._bar_entry.remove()
        if self._cache is not None:
            with spending(self._stats):
                self._cache.close(remove=self._is_temporary)
        self._cache = None
