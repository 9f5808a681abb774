"""Repeating steps: a branch ends, bit for bit, where the run would have ended at that depth."""

import copy

import lightning as L
import pytest
import torch
from models import Classifier, equal, fit, loader
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria import Decision, PrefixFreezing
from lightning_egeria.training.branches import Branches


class Frozen(PrefixFreezing):
    """Freezes to a depth after the first step."""

    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def choose_depth(self, step):
        return Decision(self.depth, "for the test") if step == 1 and self.depth else None


class Branching(PrefixFreezing):
    """Freezes to 2 after the first step; after step 4 repeats the steps at some depths and keeps one."""

    def __init__(self, depths, kept, fails=False):
        super().__init__()
        self.depths, self.kept, self.fails = depths, kept, fails
        self.seen, self.run, self.branches = {}, None, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.branches is not None:
            self.branches.batch_start(batch, trainer.global_step)

    def on_before_backward(self, trainer, pl_module, loss):
        super().on_before_backward(trainer, pl_module, loss)
        if self.branches is not None:
            self.branches.forward_end(loss)

    def start_method(self, trainer, freezer, gathered, state):
        self.trainer = trainer
        return []

    def choose_depth(self, step):
        if step == 1:
            self.branches = Branches(self.trainer, self.freezer)
            return Decision(2, "for the test")
        if self.branches is None:
            return None
        self.branches.stepped()
        if self.branches.steps < 3:
            return None
        branches, self.branches = self.branches, None
        self.run = branches.losses
        with branches.repeating() as repeats:
            for depth in self.depths:
                self.seen[depth] = repeats.at(depth)
                if depth == self.kept:
                    repeats.keep()
            if self.fails:
                raise KeyError("for the test")
        return Decision(2 if self.kept is None else self.kept, "for the test")


class Noted(Classifier):
    """Counts, measures and logs in its step, with a schedule, and keeps gradients out of a loss with noise."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer=optimizer)
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.net(inputs + 0.1 * torch.randn_like(inputs))
        self.accuracy.update(scores, labels)
        self.steps += 1
        loss = nn.functional.cross_entropy(scores, labels)
        self.losses.append(loss.item())
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def states(module, trainer):
    return copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers])


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


class AfterStep(L.Callback):
    """Copies everything behind the freezing callback after an optimizer step."""

    def __init__(self, step):
        self.step, self.found = step, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and self.found is None:
            self.found = states(pl_module, trainer), torch.get_rng_state(), copy.deepcopy(pl_module.state_dict())


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("sgd", {}),
        ("adamw", {"gradient_clip_val": 0.1}),
        ("sgd", {"accumulate_grad_batches": 2}),
        ("adamw", {"precision": "bf16-mixed"}),
    ],
)
def test_a_branch_ends_where_the_run_would_have(optimizer, arguments, kept):
    found = []
    for callback in (Frozen(kept), Branching([2, 1, 0], kept)):
        module, after = Noted(optimizer), AfterStep(4)
        fit(module, callback, after, **arguments)
        found.append((module, after.found, callback))
    (expected, (optimizers, _, weights), _), (module, (others, _, now), callback) = found
    assert callback.frozen_depth == kept
    assert same(optimizers, others)
    assert same(dict(weights), dict(now))
    assert equal(expected, module)
    if kept == 2:  # what the step itself keeps is the run's, whose depth is 2 until then
        assert expected.losses == module.losses
    assert module.steps == expected.steps
    assert callback.seen[2] == pytest.approx(callback.run, rel=0, abs=0)


def test_a_branch_sees_the_numbers_of_the_run():
    numbers = []

    class Counting(Noted):
        def training_step(self, batch, batch_idx):
            schedule, loop = self.lr_schedulers(), self.trainer.fit_loop.epoch_loop
            numbers.append((self.global_step, self.current_epoch, batch_idx, self.steps))
            assert schedule.last_epoch == self.global_step == loop.total_batch_idx
            return super().training_step(batch, batch_idx)

    fit(Counting(), Branching([1, 0], 1), limit_train_batches=3)
    first, branches, rest = numbers[1:4], numbers[4:10], numbers[10:]
    assert first == [(1, 0, 1, 1), (2, 0, 2, 2), (3, 1, 0, 3)]
    assert branches == 2 * first
    assert rest[:2] == [(4, 1, 1, 4), (5, 1, 2, 5)]


def test_without_a_kept_branch_the_run_goes_on_untouched():
    runs = []
    for callback in (Frozen(2), Branching([1, 0], None)):
        module = Noted()
        trainer = fit(module, callback)
        runs.append((module, module.accuracy.compute(), float(trainer.callback_metrics["train/loss"])))
    (first, accuracy, loss), (second, other_accuracy, other_loss) = runs
    assert equal(first, second)
    assert first.losses == second.losses
    assert accuracy == other_accuracy
    assert loss == other_loss


def test_an_error_in_a_branch_leaves_the_run_as_it_was():
    module, after = Noted(), AfterStep(4)
    fit(Noted(), Frozen(2), after)
    with pytest.raises(KeyError, match="for the test"):
        fit(module, Branching([0], None, fails=True))
    assert same(dict(after.found[2]), dict(module.state_dict()))


def test_callbacks_see_no_branch():
    calls = []

    class Counting(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            calls.append(trainer.global_step)

    fit(Noted(), Branching([1, 0], 1), Counting())
    assert calls == list(range(15))


def test_a_batch_that_the_step_changes_is_repeated_as_it_was():
    class InPlace(Noted):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(3)
            return super().training_step(batch, batch_idx)

    runs = []
    for callback in (Frozen(1), Branching([1], 1)):
        module = InPlace()
        fit(module, callback, data=loader())
        runs.append(module)
    assert equal(*runs)


def test_manual_optimization_cannot_be_repeated():
    class Manual(Classifier):
        automatic_optimization = False

    for module, expected in ((Classifier(), True), (Manual(), False)):
        module.automatic_optimization = expected
        trainer = L.Trainer(accelerator="cpu", logger=False)
        trainer.strategy.connect(module)
        assert Branches.possible(trainer) is expected
