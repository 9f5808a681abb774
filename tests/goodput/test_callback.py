"""What the callback measures; `test_datamodule.py` has whole runs."""

from lightning_egeria.methods.goodput.callback import BatchSizeSteps
from lightning_egeria.methods.goodput.profile import Configuration
from support.goodput import adaptive, numbered, trained
from support.models import After


def steps_of(trainer):
    return next((c for c in trainer.callbacks if isinstance(c, BatchSizeSteps)), None)


def test_each_kind_of_batch_is_timed():
    data = adaptive(numbered(96), batch_sizes={4: 32}, local_batch_sizes=(4, 16))
    trained(data)
    measured = data.control.profile.measured(0)
    assert set(measured) == {Configuration(1, 1, local, 0) for local in (4, 8, 16)}  # 4: halves
    assert all(0 < seconds < 10 for pair in measured.values() for seconds in pair)


def test_short_batches_and_short_steps_are_not_measured():
    data = adaptive(numbered(19))
    trained(data, epochs=3)
    assert set(data.control.profile.measured(0)) == {Configuration(1, 1, local, 0) for local in (4, 8)}
    # Of steps 0 to 8, each third has 3 samples; halves of 4 and 6.
    assert data.control.noise.estimates == 2


def test_it_is_there_during_training_only():
    seen = []
    data = adaptive()
    _, trainer = trained(data, After(lambda trainer, _: seen.append(steps_of(trainer).started), 1))
    assert seen == [True]
    assert steps_of(trainer) is None
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_the_progress_bar_shows_the_batch_size():
    shown = []

    def look(trainer, _):
        shown.append(trainer.progress_bar_callback.get_metrics(trainer, trainer.lightning_module)["batch"])

    trained(adaptive(batch_sizes={2: 16}), After(look, 1, 4), enable_progress_bar=True)
    assert shown == ["8", "16"]
