"""Who asks for a loader, and the counters of epochs."""

import lightning as L
import pytest
from lightning.pytorch.loops.fetchers import _DataFetcher

from lightning_egeria.core.training.loops import LoaderSource, count_epoch_behind_an_end
from lightning_egeria.upstream import lightning
from support.models import After, Classifier, fit, loader


class Fetcher(_DataFetcher):
    """A loop of Lightning, as far as a loader sees it."""

    def ask(self, function):
        return function()


def test_a_loop_is_told_from_all_others():
    assert Fetcher().ask(lightning.is_asked_by_loop)
    assert Fetcher().ask(lambda: [lightning.is_asked_by_loop() for _ in range(1)]) == [True]
    assert not lightning.is_asked_by_loop()


class Counting(L.Callback):
    """Keeps Lightning's counters right, and the batches."""

    def __init__(self):
        self.batches = []

    def on_train_start(self, trainer, pl_module):
        count_epoch_behind_an_end(trainer)
        count_epoch_behind_an_end(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append((trainer.current_epoch, batch_idx))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_run_that_resumed_at_the_end_of_an_epoch_resumes_again(tmp_path):
    def run(*save, ckpt_path=None):
        def keep(trainer, module):
            trainer.save_checkpoint(tmp_path / str(trainer.global_step))

        counting = Counting()
        saving = [After(keep, *save)] if save else []
        fit(Classifier(), counting, *saving, data=loader(), epochs=4, ckpt_path=ckpt_path)
        return counting.batches

    whole = run()
    length = whole.index((1, 0))
    run(length)
    assert run(2 * length + 1, ckpt_path=tmp_path / str(length)) == whole[length:]
    assert run(ckpt_path=tmp_path / str(2 * length + 1))[0] == (2, 1)


def test_sources_of_loaders_are_removed_in_any_order():
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    own = lightning.data_source(trainer)
    for first in (0, 1):
        both = [LoaderSource.install(trainer, lambda loaders: loaders) for _ in range(2)]
        assert lightning.data_source(trainer).name == own.name
        for at in (first, 1 - first, first):
            both[at].remove(trainer)
        assert lightning.data_source(trainer) is own
