"""The Lightning side of the cache: a data module around the user's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_egeria.caching.directory import CacheDirectory, default_cache_dir
from lightning_egeria.caching.engine import PrefixCache
from lightning_egeria.caching.hooks import BatchHooks, uses_argument
from lightning_egeria.caching.loading import PlannedDataset, is_own
from lightning_egeria.caching.planned import PlannedLoader, gives_samples_once, why_not
from lightning_egeria.caching.recording import Limits
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.errors import ArgumentError, CacheError
from lightning_egeria.network.prefix import FrozenPrefix
from lightning_egeria.network.sharding import holds_shards
from lightning_egeria.training.callback import PrefixFreezing, freezing_of
from lightning_egeria.training.observers import Observer
from lightning_egeria.training.progress import BarEntry

# A child of Lightning's logger: its lines appear where Lightning's do, whatever the user has set up.
_log = logging.getLogger("lightning.pytorch.lightning_egeria")
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_STEP_HOOKS = {"on_train_batch_start": 0, "on_train_batch_end": 1}  # and the place of the batch, of the module's
FIELDS_SHARE = 8  # of host_bytes is for the fields of samples
_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")


class FrozenPrefixCache(pl.LightningDataModule):
    """Trains from the cached outputs of the frozen layers, once there are any.

    It finds the `KnowledgeGuidedFreezing` callback by itself. Until that freezes something, and wherever caching would
    not give the very same training, batches are those of the user's own data module. Attributes that it does not have
    itself are read from that, and set on it.

    Args:
        datamodule: the user's own, or just the training DataLoader.
        cache_dir: where to keep what is cached; may be shared with other runs. None: ``lightning_egeria`` in the
            user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).
        max_bytes: what all that is in ``cache_dir`` may take on disk; None: half of what is free at the start.
        min_free_bytes: what must stay free on that disk.
        host_bytes: what may be kept in the memory of the host as well.
        device_bytes: what may be kept in the memory of the GPU as well.
        augmentation_views: with random augmentation, how many variants of each sample to keep: in epoch ``e``, all
            randomness of a sample is a function of ``seed``, the sample and ``e % augmentation_views``, from the first
            freeze on. 0: samples are loaded as they come, and random augmentation turns the cache off.
        seed: of that randomness.
        val_dataloaders: for validation, if ``datamodule`` is a DataLoader.

    Attributes:
        datamodule: the user's own.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule | DataLoader[Any] | None,
        cache_dir: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        min_free_bytes: int = 2 * 10**9,
        host_bytes: int = 10**9,
        device_bytes: int = 0,
        augmentation_views: int = 0,
        seed: int = 0,
        val_dataloaders: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (
            ("max_bytes", 0 if max_bytes is None else max_bytes),
            ("min_free_bytes", min_free_bytes),
            ("host_bytes", host_bytes),
            ("device_bytes", device_bytes),
            ("augmentation_views", augmentation_views),
        ):
            if value < 0:
                raise ArgumentError(f"{name} must be at least 0, got {value}")
        if isinstance(datamodule, FrozenPrefixCache):
            raise ArgumentError("datamodule is a FrozenPrefixCache already")
        if not isinstance(datamodule, pl.LightningDataModule):
            datamodule = (
                pl.LightningDataModule.from_datasets()
                if datamodule is None
                else _as_module(datamodule, val_dataloaders)
            )
        elif val_dataloaders is not None:
            raise ArgumentError("val_dataloaders is for a DataLoader; a data module has its own val_dataloader()")
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self.max_bytes = max_bytes
        self.min_free_bytes = min_free_bytes
        self.host_bytes = host_bytes
        self.device_bytes = device_bytes
        self.augmentation_views = augmentation_views
        self.seed = seed
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self._listener = _Listener()
        self._owner: PrefixFreezing | None = None
        self._bar_entry: BarEntry | None = None
        self._epochs: int | None = None
        self._stats = CacheStats(off="fit has not begun")
        for name in (*_BATCH_HOOKS, *_LOADERS):
            # Lightning asks whether a hook is overridden, so there must be none where the user has none.
            if is_overridden(name, datamodule):
                setattr(self, name, getattr(datamodule, name))
        _give_back_hyperparameters(datamodule)
        self.datamodule: pl.LightningDataModule = datamodule  # last, see `is_own`

    @property
    def stats(self) -> CacheStats:
        """What the cache has done in the last fit, so far."""
        if self._listener.cache is not None:
            self._listener.cache.measure_disk()
        return self._stats

    @property
    def hparams(self) -> Any:
        """Hyperparameters of the user's own."""
        return self.datamodule.hparams

    @property
    def hparams_initial(self) -> Any:
        """Hyperparameters of the user's own, as they were at first."""
        return self.datamodule.hparams_initial

    def __getattr__(self, name: str) -> Any:
        if name == "datamodule":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.datamodule, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = is_own(self, name, "datamodule")
        if own:
            super().__setattr__(name, value)
        if not own or (name == "trainer" and "datamodule" in vars(self)):
            setattr(self.datamodule, name, value)

    def prepare_data(self) -> None:
        """As the user's."""
        self.datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """As the user's; finds what freezes."""
        self.datamodule.setup(stage)
        if stage == "fit":
            self._close()
            self._listener = _Listener()
            self._owner = freezing_of(self.trainer)
            if self._owner is not None:
                self._listener.owner = self._owner
                self._owner.observers.add(self._listener)

    def train_dataloader(self) -> Any:
        """The user's, with a plan behind each batch if it can have one."""
        loader = self.datamodule.train_dataloader()
        self._close_cache()
        reason = self._reason_against() or why_not(loader)
        if reason is None:
            loader = self._divided(loader)
        directory = None
        try:
            directory = CacheDirectory(self.cache_dir) if reason is None else None
        except CacheError as error:
            reason = str(error)
        if directory is None or self._owner is None:
            self._stats = CacheStats(off=reason)
            if not getattr(self.trainer, "fast_dev_run", False):
                rank_zero_warn(f"the cache of the frozen layers is off: {reason}")
            return loader
        max_bytes = self.max_bytes if self.max_bytes is not None else directory.half_of_the_disk()
        limits = Limits(max_bytes, self.min_free_bytes, self.host_bytes, self.device_bytes)
        dataset = PlannedDataset(loader.dataset, loader.collate_fn, self.host_bytes // FIELDS_SHARE)
        views = self.augmentation_views
        cache = PrefixCache(dataset, directory, limits, views, self.seed, self._owner.will_compare, self._hooks())
        self._stats = cache.stats
        self._listener.follow(cache)
        self._bar_entry = BarEntry(self.trainer, "cached", cache.progress)
        epochs = getattr(self.trainer, "max_epochs", None) or -1
        self._epochs = epochs if epochs > 0 and gives_samples_once(loader) else None
        return PlannedLoader(loader, dataset, cache.plan, cache.receive, self._begin_epoch, cache.is_on)

    def teardown(self, stage: str) -> None:
        """As the user's; what was cached stays on disk."""
        if stage == "fit":
            self._close()
            self._tell_the_end()
        self.datamodule.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """As the user's; Lightning does not call `teardown` after an error."""
        self._close()
        self.datamodule.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """That of the user's own."""
        return {"datamodule": self.datamodule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """That of the user's own."""
        self.datamodule.load_state_dict(dict(state_dict["datamodule"]))

    def _begin_epoch(self) -> None:
        if self._listener.cache is not None and self.trainer is not None:
            self._listener.cache.begin_epoch(self.trainer.current_epoch, self._epochs)

    def _divided(self, loader: Any) -> Any:
        """With several processes, the loader of this one, as Lightning would make it of the user's."""
        connector = getattr(self.trainer, "_data_connector", None)
        return loader if connector is None else connector._prepare_dataloader(loader, True, RunningStage.TRAINING)

    def _reason_against(self) -> str | None:
        if self._owner is None:
            others = ", ".join(type(c).__name__ for c in self._callbacks() if "inetuning" in type(c).__name__)
            return "there is no KnowledgeGuidedFreezing among the callbacks, so nothing tells what is frozen" + (
                f" ({others} is not asked)" if others else ""
            )
        if getattr(self.trainer, "overfit_batches", 0):
            return "overfit_batches replaces the sampler"
        model = getattr(self.trainer, "lightning_module", None)
        if model is not None and holds_shards(model):
            return (
                "FSDP2 gathers the weights of a layer on all ranks together, and a rank that has the layer's outputs "
                "would not take part"
            )
        if getattr(self.trainer, "fast_dev_run", False):
            return "fast_dev_run"
        return None

    def _hooks(self) -> BatchHooks:
        """What hooks of the user may do with a batch."""
        module = getattr(self.trainer, "lightning_module", None)
        for name in _BATCH_HOOKS:
            for owner in (self.datamodule, module):
                if owner is not None and is_overridden(name, owner):
                    return BatchHooks(True, f"{type(owner).__name__}.{name} may change them")
        for name, place in _STEP_HOOKS.items():
            for owner in (module, *self._callbacks()):
                if uses_argument(owner, name, place if owner is module else place + 2):  # the trainer and the module
                    # In front of the step, it may change them too.
                    return BatchHooks(name == "on_train_batch_start", f"{type(owner).__name__}.{name} uses them")
        return BatchHooks()

    def _callbacks(self) -> list[Any]:
        return list(getattr(self.trainer, "callbacks", []))

    def _tell_the_end(self) -> None:
        stats = self._stats
        total = stats.hits + stats.advanced + stats.misses
        if total and not _rank():
            _log.info(
                f"cache: {stats.hits + stats.advanced} of {total} samples came from the cache since the first freeze, "
                f"{stats.not_loaded} were not even loaded; about {stats.seconds_saved:.1f} s saved; "
                f"{stats.bytes_on_disk / 1e9:.2f} GB in {self.cache_dir}"
            )

    def _close(self) -> None:
        self._close_cache()
        if self._owner is not None:
            self._owner.observers.remove(self._listener)

    def _close_cache(self) -> None:
        if self._bar_entry is not None:
            self._bar_entry.remove()
        if self._listener.cache is not None:
            self._listener.cache.close()
            self._listener.cache = None


class _Listener(Observer):
    """What the callback tells goes to the cache of the current DataLoader; what that has to say goes to the user."""

    def __init__(self) -> None:
        self.cache: PrefixCache | None = None
        self.owner: PrefixFreezing | None = None
        self._seen: tuple[FrozenPrefix | None, int] = (None, 0)

    def follow(self, cache: PrefixCache) -> None:
        """There is a new DataLoader."""
        self.cache = cache
        prefix = self._prefix()
        if prefix is not None and prefix.depth:
            cache.prefix_changed(prefix)

    def batch_start(self, batch: Any, step: int) -> None:
        """A batch is there for the next training step."""
        if self.cache is not None:
            self.cache.batch_begins(batch)
        self._look()
        if self.cache is not None:
            self.cache.step_begins()

    def forward_end(self, loss: Tensor) -> None:
        """Its forward is over."""
        if self.cache is not None:
            self.cache.forward_ended()

    def batch_end(self) -> None:
        """The batch is done."""
        if self.cache is None:
            return
        self.cache.step_ended()
        self._tell(self.cache)

    def abort(self) -> None:
        """The batch has no end."""
        if self.cache is not None:
            self.cache.forward_ended()

    def optimizer_step(self, step: int) -> None:
        """Something may have frozen."""
        self._look()

    def _prefix(self) -> FrozenPrefix | None:
        freezer = self.owner.freezer if self.owner is not None else None
        return freezer.prefix if freezer is not None else None

    def _look(self) -> None:
        prefix = self._prefix() or self._seen[0]  # which is unfrozen, if the layer chain is to be found anew
        seen = (prefix, prefix.version if prefix is not None else 0)
        if seen != self._seen and self.cache is not None and prefix is not None and seen[1]:
            self.cache.prefix_changed(prefix)
        self._seen = seen

    def _tell(self, cache: PrefixCache) -> None:
        while cache.messages:
            level, text = cache.messages.pop(0)
            if rank := _rank():  # which may be alone with what its cache meets
                if level >= logging.WARNING:
                    _log.warning(f"cache of rank {rank}: {text}")
            elif level >= logging.WARNING:
                rank_zero_warn(f"cache: {text}")
            else:
                _log.info(f"cache: {text}")


def _rank() -> int:
    """Of this process among all of the job, as Lightning has it set."""
    return getattr(rank_zero_only, "rank", 0)


def _give_back_hyperparameters(datamodule: pl.LightningDataModule) -> None:
    """LightningCLI gives a nested data module the arguments of the outer one; put its own in their place."""
    given = datamodule.hparams.get("datamodule")
    wrapped = str(datamodule.hparams.get("_class_path", "")).endswith(FrozenPrefixCache.__name__)
    if wrapped and isinstance(given, Mapping) and "class_path" in given:
        datamodule.hparams.clear()
        datamodule.save_hyperparameters(dict(given.get("init_args") or {}))


def _as_module(train_dataloader: Any, val_dataloaders: Any) -> pl.LightningDataModule:
    module = pl.LightningDataModule()
    vars(module)["train_dataloader"] = lambda: train_dataloader
    if val_dataloaders is not None:
        vars(module)["val_dataloader"] = lambda: val_dataloaders
    return module
