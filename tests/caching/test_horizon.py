"""What would not be read again before the run ends is not written."""

import pytest
from cached_runs import Classifier, fit, images, loader_of
from test_same_training import assert_same_training, pair
from torch.utils.data import DataLoader, RandomSampler

LATE = "so late in the run, nothing that is written would be read again"
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


def compare(tmp_path, schedule, epochs, make_data=lambda: loader_of(images()), **options):
    """An epoch has five steps, and each sample once."""
    plain, cached = pair(Classifier)
    fit(plain, make_data(), schedule, epochs=epochs)
    wrapped = fit(cached, make_data(), schedule, {"cache_dir": tmp_path, **options}, epochs=epochs)
    assert_same_training(plain, cached)
    return wrapped.stats


@pytest.mark.parametrize(
    ("step", "views", "hits"), [(11, 0, 32), (14, 0, 0), (17, 0, 0), (6, 2, 32), (11, 2, 0), (2, 4, 0)], ids=str
)
def test_four_epochs(tmp_path, step, views, hits):
    stats = compare(tmp_path, {step: 2}, 4, augmentation_views=views)
    assert stats.off == (None if hits else LATE)
    assert (stats.hits > 0) == (hits > 0) == (stats.written > 0)
    assert stats.hits <= hits


def test_a_late_freeze_is_told_once(tmp_path, caplog):
    with caplog.at_level("INFO", "lightning.pytorch"):
        stats = compare(tmp_path, {15: 2, 16: 0, 18: 2}, 4)
    assert stats.off == LATE
    assert caplog.text.count(LATE) == 1


def test_a_deeper_boundary_is_not_begun_but_the_old_one_goes_on(tmp_path):
    stats = compare(tmp_path, {8: 2, 36: 3}, 8)
    assert stats.cut == 2
    assert stats.off is None
    assert stats.advanced == 0
    assert stats.written == 40
    assert stats.hits > 150


def test_writing_ends_when_nothing_of_it_would_be_read(tmp_path):
    """The first batches are not frozen, or were planned before: their second views come in epoch 2, too late."""
    stats = compare(tmp_path, {2: 2}, 4, augmentation_views=2)
    assert 40 < stats.written < 80
    assert stats.hits == stats.written


def test_nobody_knows_what_a_sampler_with_replacement_gives_again(tmp_path):
    def make_data():
        return DataLoader(images(), 8, sampler=RandomSampler(images(), replacement=True, num_samples=160))

    stats = compare(tmp_path, {2: 2}, 1, make_data)
    assert stats.hits > 16
