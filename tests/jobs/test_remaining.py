import pytest

from lightning_egeria.cluster.hints import Hints
from lightning_egeria.jobs import remaining
from lightning_egeria.jobs.remaining import RemainingTime, share_done
from support.models import Classifier, fit


class Clock:
    """Ten seconds for each batch, and a note of each share that is done."""

    def __init__(self, monkeypatch, hints):
        self.now, self.told, self.shares = 0.0, [], []
        monkeypatch.setattr(remaining.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(remaining, "EVERY_S", 0.0)
        self.callback = RemainingTime(hints)
        end = self.callback.on_train_batch_end

        def batch_end(trainer, *of):
            self.now += 10.0
            end(trainer, *of)
            self.shares.append(share_done(trainer))
            if hints is not None and hints.exists():
                self.told.append(Hints.read(hints).seconds_left)

        self.callback.on_train_batch_end = batch_end


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 8}])
def test_the_time_that_is_left(limits, tmp_path, monkeypatch):
    clock = Clock(monkeypatch, tmp_path / "hints.json")
    fit(Classifier(), clock.callback, **limits, limit_train_batches=4)
    assert clock.shares == [step / 8 for step in range(1, 9)]
    assert clock.told == [80.0 - 10.0 * step for step in range(1, 9)]


def test_a_run_without_an_end_tells_nothing(tmp_path, monkeypatch):
    class Stop(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = self.trainer.global_step == 3

    clock = Clock(monkeypatch, tmp_path / "hints.json")
    fit(Stop(), clock.callback, max_epochs=-1)
    assert set(clock.shares) == {0.0}
    assert clock.told == []


def test_hints_that_cannot_be_written_do_not_end_training(tmp_path, monkeypatch):
    (tmp_path / "hints.json").mkdir()
    clock = Clock(monkeypatch, None)
    clock.callback.hints = tmp_path / "hints.json"
    with pytest.warns(UserWarning, match=r"remaining time: cannot write hints to .* Training continues") as said:
        fit(Classifier(), clock.callback, max_epochs=1)
    assert sum("cannot write hints" in str(one.message) for one in said) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hints.json"]
