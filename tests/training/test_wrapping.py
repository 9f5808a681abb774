"""Data modules around the user's own."""

import pickle
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.rank_zero import WarningCache

from lightning_egeria.core.training.wrapping import WrappingDataModule, nested
from lightning_egeria.errors import ArgumentError
from support.models import Classifier, Validated, equal, fit, images, loader


class Inner(WrappingDataModule):
    def __init__(self, datamodule, val_dataloaders=None):
        super().__init__()
        self.depth, self.asked = 1, 0
        self.wrap(datamodule, val_dataloaders, {"val_dataloader": self._validation})

    def _validation(self):
        self.asked += 1
        return self.datamodule.val_dataloader()


class Outer(WrappingDataModule):
    def __init__(self, datamodule):
        super().__init__()
        self.beta = 1
        self.wrap(datamodule)


class Data(L.LightningDataModule):
    def __init__(self, scale=1.0):
        super().__init__()
        self.save_hyperparameters()
        self.scale, self.calls = scale, []

    def setup(self, stage):
        self.calls.append(f"setup {stage == 'fit'}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage == 'fit'}")

    def prepare_data(self):
        self.calls.append("prepare")

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader()

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


class WithHook(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]


class HookedModel(Classifier):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 3.0, batch[1]


def test_two_wrappers_are_the_users_own():
    data = Data(scale=3.0)
    outer = Outer(Inner(data))
    outer.scale, outer.depth, outer.beta, outer.folder = 4.0, 2, 3, "data"
    assert (data.scale, data.folder, outer.datamodule.depth, outer.beta) == (4.0, "data", 2, 3)
    assert vars(data).keys().isdisjoint({"depth", "beta"})
    assert dict(outer.hparams) == dict(outer.hparams_initial) == {"scale": 3.0}
    assert outer._log_hyperparams is data._log_hyperparams is True
    with pytest.raises(AttributeError, match="something"):
        _ = outer.something
    other = Outer(Inner(Data()))
    other.load_state_dict(outer.state_dict())
    assert other.scale == 4.0
    assert Inner.find(outer) is outer.datamodule
    assert Outer.find(data) is Inner.find(None) is None
    assert [type(one) for one in nested(outer)] == [Outer, Inner, Data]


@pytest.mark.parametrize("make", [lambda: Outer(Inner(Data(2.0))), lambda: Outer(Inner(loader()))])
def test_copies_stand_alone(make):
    outer = make()
    copied = pickle.loads(pickle.dumps(outer))
    copied.depth, copied.label = 5, "copy"
    assert outer.depth == 1
    assert not hasattr(outer, "label")
    assert len(copied.train_dataloader()) == 5


def test_same_class_twice_is_refused():
    with pytest.raises(ArgumentError, match="datamodule is a Outer already"):
        Outer(Outer(loader()))
    with pytest.raises(ArgumentError, match="datamodule holds a Outer already; use one"):
        Outer(Inner(Outer(loader())))
    with pytest.raises(ArgumentError, match="val_dataloaders is for a DataLoader"):
        Inner(Data(), val_dataloaders=loader())


@pytest.mark.parametrize("given", [3, "data", images(), [loader(), images()], {"x": torch.ones(3)}])
def test_what_is_no_loader_is_refused(given):
    with pytest.raises(ArgumentError, match=r"expected a LightningDataModule or a DataLoader, got \w+\. Wrap a "):
        Outer(given)


def test_two_wrappers_train_as_the_data_alone():
    plain, wrapped = Validated(), Validated()
    plain_data, data = WithHook(0.5), WithHook(0.5)
    outer = Outer(Inner(data))
    fit(plain, data=plain_data)
    trainer = fit(wrapped, data=outer)
    assert equal(plain, wrapped)
    assert data.calls == plain_data.calls == ["prepare", "setup True", "teardown True"]
    assert outer.datamodule.asked == 1
    assert data.trainer is outer.datamodule.trainer is outer.trainer is trainer


def test_two_wrappers_train_as_the_loader_alone():
    plain, wrapped = Validated(), Validated()
    fit(plain, data=loader(), val=loader())
    trainer = fit(wrapped, data=Outer(Inner(loader(), loader())))
    assert equal(plain, wrapped)
    assert "val/loss" in trainer.callback_metrics


def said(make_model, data, monkeypatch):
    monkeypatch.setattr(data_connector, "warning_cache", WarningCache())
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model, data=data)
    return model, [str(one.message) for one in caught if "on_after_batch_transfer" in str(one.message)]


@pytest.mark.parametrize("data", [loader, Data, WithHook])
def test_hooks_and_warnings_are_those_without_it(data, monkeypatch):
    """The model has a hook for batches; with a DataLoader there is nothing to warn about."""
    plain, expected = said(HookedModel, data(), monkeypatch)
    wrapped, texts = said(HookedModel, Outer(Inner(data())), monkeypatch)
    assert texts == expected
    assert bool(texts) == (data is not loader)
    assert equal(plain, wrapped)
