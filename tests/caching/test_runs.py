"""The cache in the life of runs: resumed, repeated, side by side, with other data from some epoch on."""

import copy
import pickle
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from cached_runs import Classifier, fit, images, loader_of
from lightning.pytorch.callbacks import BaseFinetuning, RichProgressBar, StochasticWeightAveraging, TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from test_same_training import assert_same_training, pair
from torch.utils.data import Dataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.caching import engine
from lightning_egeria.caching.store import ActivationStore, read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


class OtherDataLater(L.LightningDataModule):
    """Gives larger images from the third epoch on."""

    def train_dataloader(self):
        return loader_of(images(size=8 if self.trainer.current_epoch < 3 else 12))


def test_a_dataloader_that_is_made_anew(tmp_path):
    plain, cached = pair(Classifier)
    options = {"epochs": 8, "trainer_options": {"reload_dataloaders_every_n_epochs": 3}}
    fit(plain, OtherDataLater(), {5: 2}, **options)
    wrapped = fit(cached, OtherDataLater(), {5: 2}, {"cache_dir": tmp_path / "cache"}, **options)
    assert_same_training(plain, cached)
    assert wrapped.stats.off is None
    assert len(list((tmp_path / "cache").iterdir())) == 2  # of each kind of data


class Scaled(Dataset):
    """Has something to change."""

    def __init__(self, scale):
        self.data = images()
        self.scale = scale

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image * self.scale, label


class ScaledData(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.batch_size = 2
        self.root = None

    def prepare_data(self):
        self.root = self.trainer.default_root_dir

    def train_dataloader(self):
        return loader_of(Scaled(self.scale), self.batch_size)


class Changing(L.Callback):
    """Changes one thing after each epoch."""

    def __init__(self, change):
        self.change = change

    def on_train_epoch_end(self, trainer, pl_module):
        self.change(trainer)


def scales_the_next(trainer):
    trainer.datamodule.scale = 3.0


def scales_the_dataset(trainer):
    trainer.train_dataloader.dataset.scale = 3.0


def makes_larger_batches(trainer):
    trainer.train_dataloader.batch_sampler.batch_size = 5


@pytest.mark.parametrize("change", [scales_the_next, scales_the_dataset, makes_larger_batches])
def test_what_callbacks_change_on_the_data_is_changed(tmp_path, change):
    plain, cached = pair(Classifier)
    options = {"epochs": 3, "trainer_options": {"reload_dataloaders_every_n_epochs": int(change is scales_the_next)}}
    fit(plain, ScaledData(), {}, callbacks=[Changing(change)], **options)
    data = ScaledData()
    fit(cached, data, {}, {"cache_dir": tmp_path / "cache"}, callbacks=[Changing(change)], **options)
    assert_same_training(plain, cached)
    assert data.root is not None


def test_a_dataset_that_is_changed_while_it_is_cached(tmp_path):
    plain, cached = pair(Classifier)
    fit(plain, ScaledData(), {2: 2}, callbacks=[Changing(scales_the_dataset)], epochs=3)
    with pytest.warns(UserWarning, match="samples may have changed .an attribute of the dataset was set.; all"):
        wrapped = fit(
            cached, ScaledData(), {2: 2}, {"cache_dir": tmp_path}, callbacks=[Changing(scales_the_dataset)], epochs=3
        )
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 20


def test_a_size_that_the_tuner_finds(tmp_path):
    sizes = []

    class Sized(Classifier):
        def training_step(self, batch, batch_idx):
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    data = ScaledData()
    trainer = trainer_of(1, tmp_path, [KnowledgeGuidedFreezing(ScriptedPolicy({}), background=False)])
    cached = FrozenPrefixCache(data, cache_dir=tmp_path / "cache")
    found = Tuner(trainer).scale_batch_size(Sized(), datamodule=cached, max_trials=3, steps_per_trial=2)
    assert set(sizes) == {2, 4, 8}
    assert data.batch_size == found == cached.batch_size


def test_copies_of_the_data_are_data_of_their_own(tmp_path):
    data = ScaledData()
    copied = pickle.loads(pickle.dumps(FrozenPrefixCache(data, cache_dir=tmp_path)))
    copied.scale = 2.0
    copied.cache_dir = tmp_path / "other"
    assert (copied.datamodule.scale, data.scale) == (2.0, 1.0)
    assert "cache_dir" not in vars(copied.datamodule)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_unfrozen_is_removed_from_the_disk(tmp_path, workers):
    module, _ = pair(Classifier)
    wrapped = fit(module, loader_of(images(), num_workers=workers), {5: 2, 22: 0}, {"cache_dir": tmp_path}, epochs=6)
    assert wrapped.stats.hits > 20
    assert list(tmp_path.iterdir()) == []


def test_copies_of_the_model_are_models_of_their_own(tmp_path):
    """Nothing that stands in the way of the network gets into them."""
    copies = []

    class Copying(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            copies.append((trainer.global_step, copy.deepcopy(pl_module)))

    module, _ = pair(Classifier)
    fit(module, loader_of(images()), {5: 2}, {"cache_dir": tmp_path}, 6, [Copying()])
    x = images()[:8][0]
    for step, copied in copies[20:]:
        before = [parameter.clone() for parameter in module.parameters()]
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
            assert copied.net.eval()(x).count_nonzero() == 0, step
        assert all(a.equal(b) for a, b in zip(before, module.parameters(), strict=True))


def trainer_of(epochs, folder, callbacks):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def run(module, epochs, path=None, cache=True):
        L.seed_everything(0, verbose=False)
        freezing = KnowledgeGuidedFreezing(ScriptedPolicy({7: 2, 21: 3}), background=False, deterministic=True)
        trainer = trainer_of(epochs, tmp_path, [freezing])
        data = InOrder()
        if cache:
            data = FrozenPrefixCache(data, cache_dir=tmp_path / "cache", min_free_bytes=0)
        trainer.fit(module, datamodule=data, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return data

    plain, first = pair(NoDropout)
    second = copy.deepcopy(first)
    run(plain, 8, cache=False)
    run(first, 4)
    data = run(second, 8, tmp_path / "4.ckpt")
    assert plain.losses[20:] == second.losses
    for (name, a), b in zip(plain.state_dict().items(), second.state_dict().values(), strict=True):
        assert a.equal(b), name
    assert data.stats.hits > 40


class NoDropout(Classifier):
    def __init__(self):
        super().__init__()
        self.net.c[2] = torch.nn.Identity()


class InOrder(L.LightningDataModule):
    """Has something in the checkpoint."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(images(), 8)

    def state_dict(self):
        return {"epochs": 4}

    def load_state_dict(self, state_dict):
        assert state_dict == {"epochs": 4}


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from cached_runs import Classifier, fit, images, loader_of
from lightning.pytorch.callbacks import BaseFinetuning, RichProgressBar, StochasticWeightAveraging, TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from test_same_training import pair
module, _ = pair(Classifier)
cached = fit(module, loader_of(images()), {1: 2}, {"cache_dir": sys.argv[2]}, epochs=12)
print("loss", [round(float(loss), 6) for loss in module.losses][-5:], "wrong", cached.stats.wrong)
"""


def test_runs_side_by_side_share_a_directory(tmp_path):
    module, _ = pair(Classifier)
    fit(module, loader_of(images()), {1: 2}, epochs=12)
    command = [sys.executable, "-c", RUN, str(Path(__file__).parent), str(tmp_path / "cache")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    expected = f"loss {[round(float(loss), 6) for loss in module.losses][-5:]} wrong 0"
    for run in runs:
        output, _ = run.communicate(timeout=120)
        assert expected in output
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_shallower_boundary_leaves_the_disk_when_all_is_advanced(tmp_path):
    module, _ = pair(Classifier)
    wrapped = fit(module, loader_of(images()), {5: 2, 16: 3}, {"cache_dir": tmp_path}, epochs=10)
    assert wrapped.stats.advanced > 20
    (folder,) = tmp_path.iterdir()
    assert read_manifest(folder).about["boundary"] == "net.b.2"


class Slow(Dataset):
    """Takes its time for each image."""

    def __init__(self):
        self.data = images()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.data[index]


def test_it_says_that_it_pays(tmp_path, caplog):
    module, _ = pair(Classifier)
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = fit(module, loader_of(Slow()), {5: 2}, {"cache_dir": tmp_path}, 8, compared_steps=4)
    assert caplog.text.count("cache: it pays: a sample takes") == 1
    assert caplog.text.count("samples came from the cache since the first freeze") == 1
    assert wrapped.stats.off is None
    assert wrapped.stats.seconds_saved > 0


def test_it_stops_where_it_does_not_pay(tmp_path, monkeypatch):
    read = ActivationStore.read

    def slowly(*arguments):
        time.sleep(0.005)
        return read(*arguments)

    monkeypatch.setattr(ActivationStore, "read", slowly)
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=8)
    cache = {"cache_dir": tmp_path, "host_bytes": 0}
    with pytest.warns(UserWarning, match="off: it does not pay: a sample takes .* ms from the cache and .* ms without"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, cache, 8, compared_steps=4)
    assert_same_training(plain, cached)
    assert wrapped.stats.off.startswith("it does not pay")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:cache. the weights of frozen layers have changed")  # it copies the averages back
def test_weights_that_are_averaged_at_the_end(tmp_path):
    """The callback unfreezes between the coming of a batch, whose input is not loaded, and its training step."""
    plain, cached = pair(Classifier)
    options = {"epochs": 8, "callbacks": ()}
    for module, cache in ((plain, None), (cached, {"cache_dir": tmp_path})):
        options["callbacks"] = [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=6)]
        wrapped = fit(module, loader_of(images()), {5: 2}, cache, **options)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 40


class LaterMore(BaseFinetuning):
    """Lets the front learn from the fifth epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.stem)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 5:
            self.unfreeze_and_add_param_group(pl_module.net.stem, optimizer)


class Learning(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")  # those of normalisation
@pytest.mark.filterwarnings("ignore:.*started training after the layer modules were found")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_other_code_that_lets_more_learn(tmp_path, precision):
    plain, cached = pair(Learning)
    for module, cache in ((plain, None), (cached, {"cache_dir": tmp_path})):
        options = {"callbacks": [LaterMore()], "trainer_options": {"precision": precision}}
        wrapped = fit(module, loader_of(images()), {5: 1}, cache, 8, **options)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 20


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_how_much_is_recorded(tmp_path, monkeypatch, bar):
    monkeypatch.setattr(engine, "COUNT_EVERY_S", -1.0)
    seen = {}

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen[trainer.global_step] = trainer.progress_bar_callback.get_metrics(trainer, pl_module).get("cached")
            self.bar = trainer.progress_bar_callback

    look = Look()
    shown = {"enable_progress_bar": True}
    fit(
        Classifier(),
        loader_of(images()),
        {5: 2},
        {"cache_dir": tmp_path},
        callbacks=[bar(), look],
        trainer_options=shown,
    )
    assert seen[4] is None
    assert any(text is not None and text.endswith("%") and text != "0%" for text in seen.values())
    assert seen[20] is None  # all is there
    assert "get_metrics" not in vars(look.bar)
