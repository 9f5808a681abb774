"""Observers hear of each moment of training, in a stated order."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria.core.training.observers import Observer, ObserverCallback, Observers
from support.models import Classifier, fit, loader, mlp, vectors

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:train_dataloader yielded None"),
]

# Two observers "a" and "b", added in this order; a moment is the observer and what it heard.
START = ["a batch_start", "b batch_start"]
FORWARD = ["b forward_end", "a forward_end"]
BACKWARD = ["b backward_end", "a backward_end"]
END = ["b batch_end", "a batch_end"]
ABORT = ["b abort", "a abort"]
BATCH = [*START, *FORWARD, *BACKWARD, *END]


def step(number):
    return [f"a optimizer_step {number}", f"b optimizer_step {number}"]


class Noting(Observer):
    def __init__(self, name, heard):
        self.name, self.heard = name, heard

    def batch_start(self, batch, step):
        self.heard.append(f"{self.name} batch_start")

    def forward_end(self, loss):
        self.heard.append(f"{self.name} forward_end")

    def backward_end(self):
        self.heard.append(f"{self.name} backward_end")

    def batch_end(self):
        self.heard.append(f"{self.name} batch_end")

    def optimizer_step(self, step):
        self.heard.append(f"{self.name} optimizer_step {step}")

    def abort(self):
        self.heard.append(f"{self.name} abort")


class Module(Classifier):
    def __init__(self):
        super().__init__(mlp(blocks=1))


def heard_in(module, *callbacks, data=None, **arguments):
    """What the two observers hear in one epoch of three batches."""
    heard, callback = [], ObserverCallback()
    for name in "ab":
        callback.observers.add(Noting(name, heard))
    try:
        fit(module, callback, *callbacks, data=data or loader(vectors(24)), **{"epochs": 1, **arguments})
    except InjectedError:
        heard.append("error")
    return heard


class InjectedError(Exception):
    pass


def test_ordinary_training():
    assert heard_in(Module()) == [*BATCH, *step(1), *BATCH, *step(2), *BATCH, *step(3)]


def test_accumulation_makes_one_step_of_several_batches():
    heard = heard_in(Module(), accumulate_grad_batches=2)
    assert heard == [*BATCH, *BATCH, *step(1), *BATCH, *step(2)]  # the last batch of an epoch always steps


class Manual(Module):
    """Two backwards and one step in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        for _ in range(2):
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        self.optimizers().step()


def test_manual_optimization_may_have_several_backwards():
    batch = [*START, *FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *END]
    assert heard_in(Manual()) == [*batch, *step(1), *batch, *step(2), *batch, *step(3)]


class NoStep(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def test_manual_optimization_without_a_step():
    assert heard_in(NoStep()) == [*BATCH, *BATCH, *BATCH]


class Skipping(Module):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_training_step_that_returns_none_has_no_backward():
    # Lightning calls the optimizer all the same, which finds no gradients, and counts a step.
    assert heard_in(Skipping()) == [*BATCH, *step(1), *START, *END, *step(2), *BATCH, *step(3)]


class Gaps(torch.utils.data.DataLoader):
    """Has nothing for the second batch."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield None if number == 1 else batch


def test_a_batch_that_is_none_is_not_heard_of():
    assert heard_in(Module(), data=Gaps(vectors(24), batch_size=8)) == [*BATCH, *step(1), *BATCH, *step(2)]


class EndsEpoch(Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 1 else None


def test_an_epoch_that_the_module_ends_aborts_the_batch():
    assert heard_in(EndsEpoch()) == [*BATCH, *step(1), *START, *ABORT]


class Failing(Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def fail(self, where, batch_idx=1):
        if where == self.where and batch_idx == 1 and self.global_step == 1:
            raise InjectedError(where)

    def training_step(self, batch, batch_idx):
        self.fail("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.fail("after_backward")

    def on_before_zero_grad(self, optimizer):
        self.fail("before_zero_grad")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1 and self.where == "batch_end":
            raise InjectedError("batch_end")


@pytest.mark.parametrize(
    ("where", "second"),
    [
        ("training_step", [*START, *ABORT]),
        ("before_zero_grad", [*START, *ABORT]),
        ("after_backward", [*START, *FORWARD, *BACKWARD, *ABORT]),
        ("batch_end", [*BATCH, *step(2)]),
    ],
)
def test_an_error_aborts_the_batch_that_it_breaks_off(where, second):
    assert heard_in(Failing(where)) == [*BATCH, *step(1), *second, "error"]


def test_an_error_of_another_callback_aborts_too():
    class Bad(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            raise InjectedError

    assert heard_in(Module(), Bad()) == [*START, *FORWARD, *BACKWARD, *ABORT, "error"]


class TwoOptimizers(Manual):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, -1)]


def test_several_steps_of_one_batch_are_told_as_one():
    batch = [*START, *FORWARD, *BACKWARD, *FORWARD, *BACKWARD, *END]
    assert heard_in(TwoOptimizers()) == [*batch, *step(2), *batch, *step(4), *batch, *step(6)]


class TestObservers:
    @pytest.fixture
    def heard(self):
        return []

    @pytest.fixture
    def observers(self, heard):
        return Observers(Noting("a", heard), Noting("b", heard))

    def test_an_observer_can_be_put_in_front(self, observers, heard):
        observers.add(Noting("c", heard), position=0)
        observers.batch_start(None, 0)
        observers.batch_end()
        assert [moment[0] for moment in heard] == [*"cab", *"bac"]

    def test_one_that_is_removed_hears_nothing(self, observers, heard):
        first, _ = observers
        observers.remove(first)
        observers.remove(first)  # one that is not there is ignored
        observers.batch_start(None, 0)
        assert heard == ["b batch_start"]

    def test_one_that_is_added_in_a_batch_hears_what_is_left_of_it(self, observers, heard):
        observers.batch_start(None, 0)
        observers.add(Noting("c", heard))
        observers.batch_end()
        assert heard == [*START, "c batch_end", *END]

    def test_one_may_remove_itself_while_it_is_told(self, observers, heard):
        class Leaving(Noting):
            def batch_start(self, batch, step):
                super().batch_start(batch, step)
                observers.remove(self)

        observers.add(Leaving("c", heard), position=0)
        observers.batch_start(None, 0)
        observers.batch_start(None, 1)
        assert heard == ["c batch_start", *START, *ABORT, *START]

    def test_abort_is_told_once_and_only_in_a_batch(self, observers, heard):
        observers.abort()
        assert heard == []
        observers.batch_start(None, 0)
        observers.abort()
        observers.abort()
        assert heard == [*START, *ABORT]

    def test_a_batch_that_never_ended_is_aborted_by_the_next(self, observers, heard):
        observers.batch_start(None, 0)
        observers.batch_start(None, 0)
        assert heard == [*START, *ABORT, *START]

    def test_no_abort_after_the_end(self, observers, heard):
        observers.batch_start(None, 0)
        observers.batch_end()
        observers.abort()
        assert heard == [*START, *END]
