"""Which data the cache can work with; with all others it says why not, and leaves training alone."""

import random
import warnings

import lightning as L
import numpy as np
import pytest
import torch
from cached_runs import Classifier, Net, fit, images, loader_of
from test_same_training import assert_same_training, pair
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from lightning_egeria import FrozenPrefixCache
from lightning_egeria.errors import ArgumentError, CacheError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

SCHEDULE = {5: 2}


def compare(tmp_path, make_data, make=Classifier, epochs=8, **options):
    plain, cached = pair(make)
    fit(plain, make_data(), SCHEDULE, epochs=epochs, **options)
    wrapped = fit(cached, make_data(), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=epochs, **options)
    assert_same_training(plain, cached)
    return wrapped


class ImageDataset(Dataset):
    """Map-style, with something done to each image."""

    def __init__(self, change):
        self.data = images()
        self.change = change

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return self.change(image), label


def torch_noise(image):
    return image + torch.rand(())


def numpy_noise(image):
    return image + np.random.rand()  # noqa: NPY002 - what datasets draw from


def python_noise(image):
    return image + random.random()


class OwnNoise:
    """Draws from a generator that nobody else knows."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, image):
        return image + self.generator.random(dtype=np.float32)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("noise", [torch_noise, numpy_noise, python_noise, OwnNoise()])
def test_random_augmentation_keeps_the_cache_off(tmp_path, noise, workers):
    plain, cached = pair(Classifier)
    data = [loader_of(ImageDataset(noise), num_workers=workers) for _ in range(2)]
    fit(plain, data[0], SCHEDULE)
    with pytest.warns(UserWarning, match=r"off: loading a sample .* FrozenPrefixCache\(augmentation_views=4\) keeps"):
        wrapped = fit(cached, data[1], SCHEDULE, {"cache_dir": tmp_path / "cache"})
    if not isinstance(noise, OwnNoise):  # which is one step further in each process that drew from it
        assert_same_training(plain, cached)
    assert wrapped.stats.hits == 0


def test_a_draw_without_effect_keeps_the_cache_off_as_well(tmp_path):
    """Once in a hundred times it may have one."""

    def seldom(image):
        return image.flip(-1) if torch.rand(()) < 1e-6 else image

    with pytest.warns(UserWarning, match="off: loading a sample draws random numbers"):
        compare(tmp_path, lambda: loader_of(ImageDataset(seldom)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(images())


class Batches:
    def __iter__(self):
        return iter(loader_of(images()))

    def __len__(self):
        return 5


class OwnLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("make_data", "reason"),
    [
        (lambda: DataLoader(Stream(), 8), "an IterableDataset has no sample ids"),
        (lambda: DataLoader(images(), batch_size=None), r"batch_size=None"),
        (lambda: OwnLoader(images(), 8), "OwnLoader has its own way of going through the data"),
        (lambda: Batches(), "the training data come from a Batches"),
    ],
)
def test_loaders_without_stable_ids_keep_the_cache_off(tmp_path, make_data, reason):
    make = Classifier if "batch_size" not in reason else OneByOne
    with pytest.warns(UserWarning, match=f"cache of the frozen layers is off: .*{reason}"):
        wrapped = compare(tmp_path, make_data, make, epochs=2)
    assert reason.replace("\\", "") in wrapped.stats.off


class OneByOne(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0][None], batch[1][None]), batch_idx)


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled training dataloader shuffling")
@pytest.mark.parametrize("option", [{"overfit_batches": 3}, {"fast_dev_run": 3}])
def test_modes_of_the_trainer_that_keep_it_off(tmp_path, option):
    module, _ = pair(Classifier)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = fit(
            module, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, 4, (), trainer_options=option
        )
    assert next(iter(option)) in wrapped.stats.off
    assert not (tmp_path / "cache").exists()
    told = [w for w in caught if "cache of the frozen layers" in str(w.message)]
    assert len(told) == ("overfit_batches" in option)


@pytest.mark.parametrize(
    "make_data",
    [
        lambda: DataLoader(images(), batch_sampler=BatchSampler(RandomSampler(images()), 8, drop_last=True)),
        lambda: DataLoader(Subset(images(60), range(3, 43)), 8, shuffle=True),
        lambda: DataLoader(images(), 8, sampler=RandomSampler(images(), replacement=True, num_samples=32)),
        lambda: DataLoader(images(), 8, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda: DataLoader(images(), 8, sampler=list(range(39, -1, -1))),
        lambda: DataLoader(images(), 8, shuffle=True, num_workers=1, prefetch_factor=4, persistent_workers=True),
    ],
)
def test_samplers_and_options(tmp_path, make_data):
    wrapped = compare(tmp_path, make_data)
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded > 40


class Mixing(Classifier):
    """Mixes samples before the network, from some step on."""

    def __init__(self, begin=0):
        super().__init__()
        self.begin = begin

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.global_step >= self.begin:
            x = 0.7 * x + 0.3 * x.roll(1, 0)
        return super().training_step((x, y), batch_idx)


def test_mixing_of_samples_keeps_the_cache_off(tmp_path):
    with pytest.warns(UserWarning, match="off: what the training step makes of a sample for the network is not"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), Mixing)
    assert wrapped.stats.hits == 0


class ChangedOnTheWay(Classifier):
    """Augmentation on the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * torch.empty(len(batch[0]), 1, 1, 1).uniform_(0.5, 1.5), batch[1]


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule` but have passed")
def test_a_batch_that_is_changed_on_the_way_keeps_the_cache_off(tmp_path):
    with pytest.warns(UserWarning, match="off: random numbers are drawn between the data loader and the network"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), ChangedOnTheWay)
    assert wrapped.stats.hits == 0


class MayChange(Classifier):
    """Changes batches on their way, from some step on."""

    def __init__(self, change, begin=26):
        super().__init__()
        self.change, self.begin = change, begin

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (self.change(x) if self.global_step >= self.begin else x), y


def changed_in_place(x):
    return x.mul_(1.5).view(x.shape)


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer` in `LightningModule` but have passed")
@pytest.mark.parametrize("change", [lambda x: x.flip(3), changed_in_place, lambda x: x.transpose(2, 3)])
def test_a_batch_that_is_changed_on_the_way_later_ends_the_cache(tmp_path, change, caplog):
    with (
        caplog.at_level("INFO", "lightning.pytorch"),
        pytest.warns(UserWarning, match="off: the network was not given what the data loader gave"),
    ):
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: MayChange(change))
    assert "inputs are loaded all the same (MayChange.on_after_batch_transfer may change them)" in caplog.text
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded == 0


class FlipsSometimes(L.LightningDataModule):
    def train_dataloader(self):
        return loader_of(images())

    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x.flip(3) if torch.rand(()) < 0.5 else x), y


def test_a_data_module_that_changes_some_batches_on_the_way_ends_the_cache(tmp_path):
    with pytest.warns(UserWarning, match="off: (random numbers are drawn|the network was not given what the data)"):
        wrapped = compare(tmp_path, FlipsSometimes)
    assert wrapped.stats.hits == 0


class ReadBeforeTheNetwork(Classifier):
    """In low precision, Lightning casts the batch on its way."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-3 * batch[0].square().mean()


def test_an_input_that_was_cast_on_the_way_and_is_read_is_loaded(tmp_path):
    options = {"trainer_options": {"precision": "bf16-true"}}
    wrapped = compare(tmp_path, lambda: loader_of(images()), ReadBeforeTheNetwork, **options)
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded == 0


def test_mixing_that_begins_later_ends_the_cache_where_the_input_is_there(tmp_path):
    """The input has to be loaded, because the step itself reads it."""

    class Reading(Mixing):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0 * batch[0].mean()

    with pytest.warns(UserWarning, match="off: the network was not given what the data loader gave"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: Reading(begin=23))
    assert wrapped.stats.hits > 40


class ChannelsLastMixing(Mixing):
    """The network gets a copy in any case."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x.to(memory_format=torch.channels_last), y), batch_idx)


@pytest.mark.parametrize("make", [Mixing, ChannelsLastMixing])
def test_mixing_that_begins_later_is_an_error_where_the_input_is_not_there(tmp_path, make):
    module, _ = pair(lambda: make(begin=26))
    with pytest.raises(CacheError, match=r"changed the input of the network .* that input was not loaded"):
        fit(module, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=8)


class InPlace(Classifier):
    """Changes the memory of the batch, or looks at it in another order, from some step on."""

    def __init__(self, change, begin=0):
        super().__init__()
        self.change, self.begin = change, begin

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.global_step >= self.begin:
            x = self.change(x)
        return super().training_step((x, y), batch_idx)


def cut_mix(x):
    x[:, :, 2:6, 2:6] = x[torch.randperm(len(x)), :, 2:6, 2:6]
    return x


def noise(x):
    return x.add_(torch.randn_like(x))


def noisy_copy(x):
    noise(x)
    return x.to(memory_format=torch.channels_last)


def sometimes_transposed(x):
    return x.transpose(2, 3) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("change", [cut_mix, noise, noisy_copy, sometimes_transposed])
def test_a_change_in_the_memory_of_the_batch_keeps_the_cache_off(tmp_path, change):
    with pytest.warns(UserWarning, match="off: (random numbers are drawn|the network was not given what the data)"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: InPlace(change))
    assert wrapped.stats.hits == 0


def transposed(x):
    return x.transpose(2, 3)


def transposed_copy(x):
    return x.transpose(2, 3).contiguous()


def doubled(x):
    return x.mul_(2)


@pytest.mark.parametrize("change", [transposed, transposed_copy, doubled])
def test_a_change_in_memory_that_begins_later_is_an_error_where_the_input_is_not_there(tmp_path, change):
    module, _ = pair(lambda: InPlace(change, begin=26))
    with pytest.raises(CacheError, match=r"changed the input of the network .* that input was not loaded"):
        fit(module, loader_of(images()), SCHEDULE, {"cache_dir": tmp_path / "cache"}, epochs=8)


def same(x):
    return x


def same_layout(x):
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("change", [same, same_layout, transposed, torch.Tensor.contiguous])
@pytest.mark.parametrize("collate", [None, "channels_last"])
def test_what_is_done_alike_to_every_batch_is_no_change(tmp_path, change, collate):
    collate_fn = channels_last if collate is not None else None
    wrapped = compare(tmp_path, lambda: loader_of(images(43), collate_fn=collate_fn), lambda: InPlace(change))
    assert wrapped.stats.not_loaded > 40


def channels_last(samples):
    images, labels = torch.utils.data.default_collate(samples)
    return images.to(memory_format=torch.channels_last), labels


class Scaled(Net):
    """One more argument, for the front or for the back."""

    def __init__(self, front=True):
        super().__init__()
        self.front = front

    def forward(self, x, scale=None, mask=None):
        if scale is not None and self.front:
            x = x * scale
        x = self.b(self.a(self.stem(x)))
        if scale is not None and not self.front:
            x = x * scale
        return self.head(self.c(x).mean((2, 3)))


class WithArgument(Classifier):
    def __init__(self, argument, front=True, by_name=True):
        super().__init__(Scaled(front))
        self.argument, self.by_name = argument, by_name

    def training_step(self, batch, batch_idx):
        x, y = batch
        argument = self.argument(self.global_step)
        output = self.net(x, scale=argument) if self.by_name else self.net(x, argument)
        loss = nn.functional.cross_entropy(output, y)
        self.losses.append(loss.detach().clone())
        return loss


def noise_of_each_step(step):
    return torch.rand(1, 3, 1, 1)


@pytest.mark.parametrize("front", [True, False])
@pytest.mark.parametrize("argument", [lambda step: 1 + step / 10, noise_of_each_step])
def test_another_argument_that_the_front_reads_must_stay_what_it_is(tmp_path, argument, front):
    if argument is noise_of_each_step and not front:
        argument = lambda step: torch.rand(1, 8, 1, 1)  # noqa: E731 - which the back may have as it likes
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: WithArgument(argument, front))
        assert wrapped.stats.not_loaded > 40
        return
    with pytest.warns(UserWarning, match="off: the network was given something else as its argument 'scale'"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: WithArgument(argument, front))
    assert wrapped.stats.hits == 0


LATER = {
    "number": lambda step: 1.0 if step < 26 else 2.0,
    "nothing": lambda step: None if step < 26 else 2.0,
    "tensor": lambda step: torch.tensor(1.0 if step < 26 else 2.0),
    "list": lambda step: [1.0, 1.0][step < 26] if step < 26 else 2,
}


class InAnotherLayout(WithArgument):
    """The network gets a copy of the input."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].to(memory_format=torch.channels_last), batch[1]), batch_idx)


@pytest.mark.parametrize("make", [WithArgument, InAnotherLayout])
@pytest.mark.parametrize("argument", LATER)
def test_an_argument_that_changes_later_has_the_input_loaded_after_all(tmp_path, argument, make):
    with pytest.warns(UserWarning, match="off: the network was given something else as its argument number 2 than"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: make(LATER[argument], by_name=False))
    assert wrapped.stats.not_loaded > 40


class InPlaceArgument(Classifier):
    """A tensor that is changed in place."""

    def __init__(self):
        super().__init__(Scaled())
        self.register_buffer("scale", torch.ones(1, 3, 1, 1))

    def training_step(self, batch, batch_idx):
        if self.global_step >= 26:
            self.scale.mul_(1.5)
        loss = nn.functional.cross_entropy(self.net(batch[0], self.scale), batch[1])
        self.losses.append(loss.detach().clone())
        return loss


def test_an_argument_that_is_changed_in_place(tmp_path):
    with pytest.warns(UserWarning, match="off: the network was given something else as its argument number 2 than"):
        wrapped = compare(tmp_path, lambda: loader_of(images(43)), InPlaceArgument)
    assert wrapped.stats.not_loaded > 40


class Reading(Classifier):
    """The training step itself looks at the input."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-3 * batch[0].square().mean()


def test_an_input_that_the_step_reads_is_loaded(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = compare(tmp_path, lambda: loader_of(images()), Reading)
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded == 0
    assert "inputs are loaded all the same (aten::pow uses them)" in caplog.text


class SeldomDark(nn.Module):
    """Draws in a module that is not frozen, to next to no effect."""

    def __init__(self, draw, first):
        super().__init__()
        self.net = Net()
        self.draw = draw
        self.first = first

    def forward(self, x):
        if self.first:
            x = self.darkened(x)
        x = self.net.stem(x)
        if not self.first:
            x = self.darkened(x)
        return self.net.head(self.net.c(self.net.b(self.net.a(x))).mean((2, 3)))

    def darkened(self, x):
        return x * 0 if self.training and self.draw() < 1e-6 else x


DRAWS = [
    lambda: torch.rand(()),
    lambda: np.random.rand(),  # noqa: NPY002 - what networks draw from
    lambda: random.random(),
]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_in_front_of_the_boundary_keeps_the_cache_off(tmp_path, draw):
    """In a hundred steps it may have an effect."""
    with pytest.warns(UserWarning, match="off: the frozen layers draw random numbers, or the code between them does"):
        compare(tmp_path, lambda: loader_of(images()), lambda: Classifier(SeldomDark(draw, first=True)), epochs=4)


def test_in_front_of_a_draw_the_cache_is_on(tmp_path):
    network = SeldomDark(lambda: torch.rand(()), first=False)
    wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: Classifier(network))
    assert wrapped.stats.cut == 1
    assert wrapped.stats.hits > 40


class Twice(Classifier):
    def training_step(self, batch, batch_idx):
        self.net(batch[0].flip(-1))
        return super().training_step(batch, batch_idx)


def test_a_network_that_is_called_twice_keeps_the_cache_off(tmp_path):
    with pytest.warns(UserWarning, match="cache of the frozen layers is off"):
        compare(tmp_path, lambda: loader_of(images()), Twice)


class Frames(nn.Module):
    """Is given frames in the batch dimension, beside one label for all frames of a sample."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, frames, labels):
        return nn.functional.cross_entropy(self.net(frames).view(len(labels), -1, 4).mean(1), labels)


class Videos(Classifier):
    def __init__(self):
        super().__init__(Frames())

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0].flatten(0, 1), batch[1])
        self.losses.append(loss.detach().clone())
        return loss


def test_frames_in_the_batch_dimension_keep_the_cache_off(tmp_path):
    videos = TensorDataset(images(120)[:][0].view(40, 3, 3, 8, 8), images()[:][1])
    with pytest.warns(UserWarning, match="boundary activation does not have the samples of the batch in its first"):
        compare(tmp_path, lambda: DataLoader(videos, 8, shuffle=True), Videos)


class Skipping(nn.Module):
    """The input of the network is used again behind the frozen layers."""

    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1))
        self.back = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.back(self.front(x) + x).mean((2, 3)))


def test_an_input_that_is_used_behind_the_boundary_is_loaded(tmp_path):
    wrapped = compare(tmp_path, lambda: loader_of(images()), lambda: Classifier(Skipping()))
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded == 0


def test_without_the_callback_it_is_inert_and_says_so(tmp_path):
    plain, cached = pair(Classifier)

    def trained(module, **data):
        L.seed_everything(0, verbose=False)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
        trainer = L.Trainer(accelerator="cpu", enable_model_summary=False, callbacks=[OtherFinetuning()], **options)
        trainer.fit(module, **data)

    trained(plain, train_dataloaders=loader_of(images()))
    wrapped = FrozenPrefixCache(loader_of(images()), cache_dir=tmp_path / "cache")
    with pytest.warns(UserWarning, match=r"there is no KnowledgeGuidedFreezing .*\(OtherFinetuning is not asked\)"):
        trained(cached, datamodule=wrapped)
    assert_same_training(plain, cached)
    assert not (tmp_path / "cache").exists()


class OtherFinetuning(L.pytorch.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.stem)

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


@pytest.mark.parametrize("name", ["max_bytes", "min_free_bytes", "host_bytes", "device_bytes", "augmentation_views"])
def test_wrong_numbers(name):
    with pytest.raises(ArgumentError, match=f"{name} must be at least 0, got -1"):
        FrozenPrefixCache(loader_of(images()), **{name: -1})


def test_a_cache_around_a_cache():
    with pytest.raises(ArgumentError, match="is a FrozenPrefixCache already"):
        FrozenPrefixCache(FrozenPrefixCache(loader_of(images())))
