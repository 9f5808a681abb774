"""An epoch gets another number of batches, and Lightning believes it; `tests/goodput` has whole runs."""

from types import SimpleNamespace

import pytest

from lightning_egeria.core.training.loops import set_epoch_length

BY_THE_CLOCK = None  # Lightning has no number of batches then, and no ``val_check_interval``


@pytest.mark.parametrize(
    ("interval", "before", "after"),
    [(1.0, 10, 7), (0.5, 5, 3), (0.01, 1, 1), (4, 4, 4), (9, 9, 7), (BY_THE_CLOCK, None, None)],
)
def test_lightning_counts_the_new_batches(interval, before, after):
    loader = SimpleNamespace(limits=[10], flattened=[None])
    fetcher = SimpleNamespace(length=10, fetched=7, done=False)
    loop = SimpleNamespace(max_batches=10, _combined_loader=loader, _data_fetcher=fetcher)
    options = {"val_check_batch": before, "check_val_every_n_epoch": 1}
    options |= {"val_check_interval": interval} if interval is not BY_THE_CLOCK else {}
    trainer = SimpleNamespace(fit_loop=loop, **options)
    set_epoch_length(trainer, 7)
    assert (loop.max_batches, fetcher.length, fetcher.done) == (7, 7, True)
    assert loader.limits == [float("inf")]
    assert trainer.val_check_batch == after
    set_epoch_length(trainer, 8)
    assert not fetcher.done


def test_a_loader_without_length_stays():
    fetcher = SimpleNamespace(length=None, fetched=3, done=False)
    loop = SimpleNamespace(max_batches=float("inf"), _combined_loader=None, _data_fetcher=fetcher)
    trainer = SimpleNamespace(fit_loop=loop, val_check_interval=1.0, val_check_batch=float("inf"))
    set_epoch_length(trainer, 7)
    assert fetcher.length is None
    assert trainer.val_check_batch == float("inf")
