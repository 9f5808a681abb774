"""What would not be read again before the run ends is not written."""

import pytest
from cached_runs import Classifier, fit, images, loader_of
from test_same_training import assert_same_training, pair
from torch.utils.data import DataLoader, RandomSampler

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")


def compare(tmp_path, schedule, epochs, make_data=lambda: loader_of(images()), **options):
    """An epoch has five steps, and each sample once."""
    plain, cached = pair(Classifier)
    fit(plain, make_data(), schedule, epochs=epochs)
    wrapped = fit(cached, make_data(), schedule, {"cache_dir": tmp_path, **options}, epochs=epochs)
    assert_same_training(plain, cached)
    assert wrapped.stats.off is None
    return wrapped.stats


@pytest.mark.parametrize(("step", "views"), [(11, 0), (6, 2)])
def test_what_is_read_again_is_written(tmp_path, step, views):
    """In four epochs, what is written in the third is read in the fourth; with two views, that of the second."""
    stats = compare(tmp_path, {step: 2}, 4, augmentation_views=views)
    assert 0 < stats.hits <= stats.written


@pytest.mark.parametrize(("step", "views"), [(14, 0), (17, 0), (11, 2), (2, 4)])
def test_what_is_not_read_again_is_not_written(tmp_path, step, views):
    stats = compare(tmp_path, {step: 2}, 4, augmentation_views=views)
    assert stats.misses > 0
    assert stats.hits == stats.written == 0


def test_a_deeper_boundary_that_comes_late_goes_on_from_the_old_one(tmp_path):
    stats = compare(tmp_path, {8: 2, 32: 3}, 8)
    assert stats.written == 40  # all of the old one
    assert stats.advanced > 24


def test_nobody_knows_what_a_sampler_with_replacement_gives_again(tmp_path):
    def make_data():
        return DataLoader(images(), 8, sampler=RandomSampler(images(), replacement=True, num_samples=160))

    stats = compare(tmp_path, {2: 2}, 1, make_data)
    assert stats.hits > 16


def test_the_next_run_reads_what_is_there(tmp_path):
    for written in (40, 0):
        stats = compare(tmp_path, {1: 1}, 4)
        assert stats.written == written
    assert stats.hits > 80
