"""The base of data modules around the user's own: the user's in all that they do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_egeria.errors import ArgumentError, CheckpointError
from lightning_egeria.upstream.lightning import (
    let_hooks_belong_to,
    logs_hyperparameters,
    set_logs_hyperparameters,
)
from lightning_egeria.upstream.torch import tree_leaves

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = ("val_dataloader", "test_dataloader", "predict_dataloader")


class WrappingDataModule(pl.LightningDataModule):
    """A data module around the user's own, or around another one of this kind.

    It is the user's data module in all that a subclass does not change: attributes, hyperparameters, hooks, loaders and
    state. Attributes that it does not have itself are read from the user's, and set on it.

    A subclass calls ``super().__init__()`` first and `wrap` last: attributes set in between are its own.

    Attributes:
        datamodule: what it wraps.
    """

    datamodule: pl.LightningDataModule

    def wrap(
        self,
        datamodule: pl.LightningDataModule | DataLoader[Any] | None,
        val_dataloaders: Any = None,
        loaders: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        """Become the user's data module. Call it at the end of ``__init__``.

        Args:
            datamodule: the user's own, or just the training DataLoader; None for one without loaders.
            val_dataloaders: for validation, if ``datamodule`` is a DataLoader.
            loaders: methods that take the place of the user's ``val_dataloader`` and its like, where the user has one.

        Raises:
            ArgumentError: ``datamodule`` is neither a data module nor loaders, holds a data module of this class
                already, or has its own validation loaders.
        """
        if isinstance(datamodule, type(self)):
            raise ArgumentError(f"datamodule is a {type(self).__name__} already")
        if any(isinstance(inner, type(self)) for inner in nested(datamodule)):
            raise ArgumentError(f"datamodule holds a {type(self).__name__} already; use one")
        vars(self)["_wraps_loader"] = not isinstance(datamodule, pl.LightningDataModule)
        if not isinstance(datamodule, pl.LightningDataModule):
            datamodule = (
                pl.LightningDataModule.from_datasets()
                if datamodule is None
                else _as_module(datamodule, val_dataloaders)
            )
        elif val_dataloaders is not None:
            raise ArgumentError("val_dataloaders is for a DataLoader; a data module has its own val_dataloader()")
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        for name in (*BATCH_HOOKS, *_LOADERS):
            # Lightning asks whether a hook is overridden, so there must be none where the user has none.
            if is_overridden(name, datamodule) and not is_overridden(name, self):
                setattr(self, name, (loaders or {}).get(name) or getattr(datamodule, name))
        _give_back_hyperparameters(type(self).__name__, datamodule)
        self.datamodule = datamodule  # last, see `_is_own`

    @property
    def wraps_loader(self) -> bool:
        """Whether the user gave loaders and no data module."""
        if isinstance(self.datamodule, WrappingDataModule):
            return self.datamodule.wraps_loader
        return bool(vars(self)["_wraps_loader"])

    @property
    def _log_hyperparams(self) -> bool:
        """Whether Lightning logs them: as the user's data module says."""
        return logs_hyperparameters(vars(self)["datamodule"]) if "datamodule" in vars(self) else False

    @_log_hyperparams.setter
    def _log_hyperparams(self, value: bool) -> None:
        if "datamodule" in vars(self):
            set_logs_hyperparameters(self.datamodule, value)

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
        own = _is_own(self, name)
        if own:
            super().__setattr__(name, value)
        is_trainer = name == "trainer" and "datamodule" in vars(self)
        if not own or is_trainer:
            setattr(self.datamodule, name, value)
        if is_trainer and value is not None:
            self.attach_hooks(value)

    def attach_hooks(self, trainer: pl.Trainer) -> None:
        """Let Lightning choose between the hooks of the model and of the user's data module as without the wrapper.

        The Trainer asks who has hooks for batches, and warns where the model and a data module both might. Where the
        user gave a DataLoader, there is no data module to warn about.
        """
        let_hooks_belong_to(trainer, None if self.wraps_loader else self.datamodule)

    def prepare_data(self) -> None:
        """As the user's."""
        self.datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """As the user's."""
        self.datamodule.setup(stage)

    def train_dataloader(self) -> Any:
        """As the user's."""
        return self.datamodule.train_dataloader()

    def teardown(self, stage: str) -> None:
        """As the user's."""
        self.datamodule.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """As the user's; Lightning does not call `teardown` after an error."""
        self.datamodule.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """That of the user's own."""
        return {"datamodule": self.datamodule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """That of the user's own.

        Raises:
            CheckpointError: if it is not the state of a wrapper.
        """
        given: Any = state_dict
        inner = given.get("datamodule") if isinstance(given, Mapping) else None
        if not isinstance(inner, Mapping):
            raise CheckpointError(
                f"the {type(self).__name__} state in the checkpoint is damaged: it has no state of the user's data "
                "module. Take another checkpoint, or leave out ckpt_path"
            )
        self.datamodule.load_state_dict(dict(inner))

    @classmethod
    def find(cls, datamodule: Any) -> Self | None:
        """Return the data module of this class that stands around, or under, others; None without one."""
        return next((one for one in nested(datamodule) if isinstance(one, cls)), None)


def remove_callback(trainer: Any, callback: pl.Callback) -> None:
    """Remove a callback that was added for a fit. Safe to call twice."""
    callbacks = getattr(trainer, "callbacks", [])
    if callback in callbacks:
        # Another list: a thread of the progress bar, or a loop over callbacks, may be reading this one.
        trainer.callbacks = [one for one in callbacks if one is not callback]


def nested(datamodule: Any) -> Iterator[Any]:
    """Yield a data module, and those that it wraps, from the outside to the user's own."""
    while datamodule is not None:
        yield datamodule
        datamodule = datamodule.datamodule if isinstance(datamodule, WrappingDataModule) else None


def _is_own(wrapper: WrappingDataModule, name: str) -> bool:
    """Whether an attribute is set on the wrapper itself; all that is set before ``datamodule`` is its own."""
    return "datamodule" not in vars(wrapper) or name in vars(wrapper) or hasattr(type(wrapper), name)


def _give_back_hyperparameters(wrapper: str, datamodule: pl.LightningDataModule) -> None:
    """LightningCLI gives a nested data module the arguments of the outermost; put its own in their place."""
    own = list(nested(datamodule))[-1]
    given = own.hparams.get("datamodule")
    if str(own.hparams.get("_class_path", "")).rpartition(".")[2] != wrapper:
        return
    arguments: dict[str, Any] | None = None
    for _ in nested(datamodule):
        if not isinstance(given, Mapping) or "class_path" not in given:
            return
        arguments = dict(given.get("init_args") or {})
        given = arguments.get("datamodule")
    own.hparams.clear()
    own.save_hyperparameters(arguments)


def _as_module(train_dataloader: Any, val_dataloaders: Any) -> pl.LightningDataModule:
    for loader in tree_leaves(train_dataloader):
        if isinstance(loader, (str, bytes, Tensor)) or not isinstance(loader, Iterable):
            raise ArgumentError(
                f"expected a LightningDataModule or a DataLoader, got {type(loader).__name__}. Wrap a "
                "dataset in a loader first: DataLoader(dataset, batch_size=32)"
            )
    module = pl.LightningDataModule()
    vars(module)["train_dataloader"] = functools.partial(_given, train_dataloader)
    if val_dataloaders is not None:
        vars(module)["val_dataloader"] = functools.partial(_given, val_dataloaders)
    return module


def _given(loaders: Any) -> Any:
    return loaders
