"""Random augmentation: a few views of each sample, each a function of the seed, the sample and the epoch."""

import shutil

import pytest
from cached_runs import Classifier, fit, images
from test_loaders import ImageDataset, OwnNoise, numpy_noise, python_noise, torch_noise
from test_same_training import assert_same_training, pair
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

SCHEDULE = {1: 2}


class Numbered(Dataset):
    """Says which sample it is."""

    def __init__(self, change):
        self.data = ImageDataset(change)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return (*self.data[index], index)


class Watching(Classifier):
    """Keeps what it has seen of each sample in each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        images, labels, numbers = batch
        self.seen += [(self.current_epoch, n, image) for n, image in zip(numbers.tolist(), images, strict=True)]
        return super().training_step((images, labels), batch_idx)


def everything(image):
    return torch_noise(numpy_noise(python_noise(image)))


def loader(workers=0):
    return DataLoader(Numbered(everything), 8, shuffle=True, num_workers=workers)


def slow(tmp_path):
    """The same views without a single entry: no disk has so much free."""
    return {"cache_dir": tmp_path / "nothing", "min_free_bytes": shutil.disk_usage(tmp_path).total}


@pytest.mark.filterwarnings("ignore:cache. no more outputs")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("views", [1, 3])
def test_cached_views_are_the_views(tmp_path, views, workers):
    uncached, cached = pair(Watching)
    options = {"augmentation_views": views, "seed": 5}
    without = fit(uncached, loader(workers), SCHEDULE, {**slow(tmp_path), **options}, epochs=8)
    wrapped = fit(cached, loader(workers), SCHEDULE, {"cache_dir": tmp_path / "cache", **options}, epochs=8)
    assert_same_training(uncached, cached)
    assert without.stats.hits == 0
    assert wrapped.stats.hits > 40
    assert wrapped.stats.written >= 32 * views


@pytest.mark.filterwarnings("ignore:cache. no more outputs")
@pytest.mark.parametrize("workers", [0, 2])
def test_views_change_from_epoch_to_epoch_and_come_back(tmp_path, workers):
    module, _ = pair(Watching)
    fit(module, loader(workers), SCHEDULE, {**slow(tmp_path), "augmentation_views": 2}, epochs=6)
    by_sample = {(epoch, number): image for epoch, number, image in module.seen}
    for number in range(40):
        first, second, third, fourth = (by_sample[epoch, number] for epoch in (1, 2, 3, 4))
        assert first.equal(third)
        assert second.equal(fourth)
        assert not first.equal(second)
    assert len({float(by_sample[1, n][0, 0, 0] - images()[n][0][0, 0, 0]) for n in range(40)}) > 35


@pytest.mark.filterwarnings("ignore:cache. no more outputs")
def test_other_seeds_give_other_views(tmp_path):
    first, second = pair(Watching)
    for seed, module in enumerate((first, second)):
        fit(module, loader(), SCHEDULE, {**slow(tmp_path), "augmentation_views": 2, "seed": seed}, epochs=3)
    last = [{n: image for epoch, n, image in module.seen if epoch == 2} for module in (first, second)]
    assert not any(last[0][number].equal(last[1][number]) for number in range(40))


def test_a_generator_of_its_own_keeps_the_cache_off(tmp_path):
    module, _ = pair(Classifier)
    data = DataLoader(ImageDataset(OwnNoise()), 8, shuffle=True)
    with pytest.warns(UserWarning, match="although torch, numpy and random were seeded alike"):
        fit(module, data, SCHEDULE, {"cache_dir": tmp_path / "cache", "augmentation_views": 2})


def test_random_numbers_of_training_are_not_touched(tmp_path):
    """Dropout and shuffling go on as they would have."""
    plain, cached = pair(Classifier)
    data = [DataLoader(ImageDataset(lambda image: image), 8, shuffle=True) for _ in range(2)]
    fit(plain, data[0], SCHEDULE, epochs=6)
    wrapped = fit(cached, data[1], SCHEDULE, {"cache_dir": tmp_path / "cache", "augmentation_views": 2}, epochs=6)
    assert_same_training(plain, cached)
    assert wrapped.stats.hits > 40
