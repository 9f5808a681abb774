"""Stopping a job from outside: who is asked, and who stops."""

from types import SimpleNamespace

import pytest

from lightning_egeria.core.training.stopping import is_to_stop, stop


class Stopper:
    def __init__(self, is_asked):
        self.is_asked = is_asked

    def stop(self, trainer):
        raise SystemExit(75)


def test_lightning_or_a_callback_may_be_asked():
    trainer = SimpleNamespace(callbacks=[object(), Stopper(False)], received_sigterm=False)
    assert not is_to_stop(trainer)
    trainer.callbacks.append(Stopper(True))
    assert is_to_stop(trainer)
    assert is_to_stop(SimpleNamespace(callbacks=[], received_sigterm=True))


def test_a_callback_stops():
    stop(SimpleNamespace(callbacks=[object()]))
    with pytest.raises(SystemExit):
        stop(SimpleNamespace(callbacks=[object(), Stopper(True)]))
