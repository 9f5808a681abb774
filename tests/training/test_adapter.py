"""Hooks of Lightning become moments of training. `test_observers.py` has their order."""

import pytest
import torch

from lightning_egeria.core.training.observers import Observer, ObserverCallback
from support.models import Classifier, Validated, fit, loader, mlp, vectors


class Noting(Observer):
    def __init__(self):
        self.heard = []

    def batch_start(self, batch, step):
        self.heard.append(("batch_start", len(batch[0]), step))

    def forward_end(self, loss):
        assert loss.grad_fn is not None
        self.heard.append(("forward_end", loss.item()))

    def optimizer_step(self, step):
        self.heard.append(("optimizer_step", step))

    def abort(self):
        self.heard.append(("abort",))


def noting():
    callback, observer = ObserverCallback(), Noting()
    callback.observers.add(observer)
    return callback, observer


def classifier(kind=Classifier):
    torch.manual_seed(0)
    return kind(mlp(blocks=1))


def heard(observer, name):
    return [moment[1:] for moment in observer.heard if moment[0] == name]


def test_the_batch_comes_with_the_steps_before_it():
    callback, observer = noting()
    fit(classifier(), callback, data=loader(vectors(20)), epochs=2)
    assert heard(observer, "batch_start") == [(8, 0), (8, 1), (4, 2), (8, 3), (8, 4), (4, 5)]
    assert heard(observer, "optimizer_step") == [(1,), (2,), (3,), (4,), (5,), (6,)]


def test_the_loss_is_that_of_the_training_step():
    callback, observer = noting()
    module = classifier()
    fit(module, callback, data=loader(vectors()), epochs=1)
    assert heard(observer, "forward_end") == [(loss,) for loss in module.losses]
    assert len(module.losses) == 5


def test_with_accumulation_the_loss_is_the_scaled_one():
    callback, observer = noting()
    module = classifier()
    fit(module, callback, data=loader(vectors(32)), epochs=1, accumulate_grad_batches=2)
    assert heard(observer, "forward_end") == [pytest.approx((loss / 2,)) for loss in module.losses]
    assert heard(observer, "optimizer_step") == [(1,), (2,)]


def test_validation_is_not_heard_of():
    (first, plain), (second, validated) = noting(), noting()
    fit(classifier(), first, data=loader(vectors(24)), epochs=2)
    fit(classifier(Validated), second, data=loader(vectors(24)), val=loader(vectors(16)), epochs=2)
    assert plain.heard == validated.heard


def test_a_fit_that_ends_well_is_not_aborted():
    callback, observer = noting()
    trainer = fit(classifier(), callback, data=loader(vectors(24)), epochs=1)
    callback.teardown(trainer, None, "fit")
    callback.on_exception(trainer, None, KeyboardInterrupt())
    assert heard(observer, "abort") == []


def test_what_comes_before_the_observers_comes_before_each_step():
    order = []

    class Deciding(ObserverCallback):
        def before_optimizer_step_observers(self, trainer):
            order.append(f"decide after {trainer.global_step}")

    class Hearing(Observer):
        def batch_end(self):
            order.append("batch_end")

        def optimizer_step(self, step):
            order.append(f"step {step}")

    callback = Deciding()
    callback.observers.add(Hearing())
    fit(classifier(), callback, data=loader(vectors(16)), epochs=1)
    assert order == ["batch_end", "decide after 1", "step 1", "batch_end", "decide after 2", "step 2"]
