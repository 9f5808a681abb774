"""`LayerFinding`, the base of every callback that works on the layer chain, with a method that only notes its calls."""

import pytest

from lightning_egeria.core.training.finding import LayerFinding
from lightning_egeria.errors import ArgumentError, CheckpointError
from support.models import Classifier, fit

NAMES = ["net.stem.0", "net.middle.0", "net.deep.0"]


class Noting(LayerFinding):
    def __init__(self, error=None, **arguments):
        super().__init__("noting", **arguments)
        self.calls, self.error = [], error

    def chain_found(self, trainer, pl_module, chain, state):
        self.calls.append(("found", trainer.global_step, state and state["calls"]))
        if self.error is not None:
            raise self.error

    def chain_released(self):
        self.calls.append(("released",))

    def own_state(self):
        return {"calls": len(self.calls)}


def test_the_chain_is_found_once_and_released_at_the_end():
    callback = Noting()
    assert (callback.chain, callback.layer_modules) == (None, [])
    fit(Classifier(), callback)
    assert callback.calls == [("found", 0, None), ("released",)]
    assert callback.layer_modules == NAMES


def test_each_fit_finds_its_own():
    callback = Noting()
    fit(Classifier(), callback)
    fit(Classifier(), callback)
    assert callback.calls == [("found", 0, None), ("released",)] * 2


def test_an_error_at_the_start_releases_it():
    callback = Noting(error=RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        fit(Classifier(), callback)
    assert callback.calls == [("found", 0, None), ("released",)]


def test_a_resumed_run_has_chain_and_state_before_its_first_step(tmp_path):
    trainer = fit(Classifier(), Noting(), epochs=1)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    callback = Noting()
    fit(Classifier(), callback, ckpt_path=tmp_path / "checkpoint", epochs=2)
    assert callback.calls == [("found", 5, 1), ("released",)]


def test_named_layer_modules_are_taken():
    callback = Noting(layer_modules=["net.stem", "net.deep"])
    fit(Classifier(), callback, epochs=1)
    assert callback.layer_modules == ["net.stem", "net.deep"]
    with pytest.raises(ArgumentError, match="layer_modules must be a list"):
        Noting(layer_modules="net.stem")


def test_messages_name_the_method():
    with pytest.raises(CheckpointError, match="the checkpoint holds noting state of version 7, expected version 1"):
        Noting().load_state_dict({"version": 7})
