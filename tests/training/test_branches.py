"""Trying depths: a branch is the run frozen there, and the run that goes on has seen none."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria import Decision, PrefixFreezing
from lightning_egeria.core.training.branches import Branches
from lightning_egeria.core.training.feed import Feed
from support.models import Classifier, equal, fit, images, loader

STEPS = 6


class Frozen(PrefixFreezing):
    """Freezes to a depth after the first step."""

    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def choose_depth(self, step):
        return Decision(self.depth, "for the test") if step == 1 and self.depth else None


class Branching(Frozen):
    """The same, after it has tried other depths there."""

    def __init__(self, tried, depth, fails=False):
        super().__init__(0)
        self.tried, self.then, self.fails, self.seen = tried, depth, fails, {}

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        feed = Feed.install(trainer, self, lambda: self.try_depths(trainer, feed))

    def try_depths(self, trainer, feed):
        if trainer.global_step != 1 or trainer.fit_loop.epoch_loop._should_accumulate():
            return
        branches = Branches(trainer, self.freezer, feed)
        try:
            for depth in self.tried:
                self.seen[depth] = branches.at(depth, STEPS * trainer.accumulate_grad_batches)
            if self.fails:
                raise KeyError("for the test")
        finally:
            branches.leave()
        self.freezer.freeze_to(self.then, "for the test")


class Everything(Classifier):
    """Does in its step and its hooks what programs do: counts, averages, warms up, logs, draws, changes its batch."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer=optimizer)
        self.accuracy = MulticlassAccuracy(num_classes=3)
        self.teacher = [copy.deepcopy(self.net)]  # no submodule
        self.register_buffer("center", torch.zeros(3))
        self.memory, self.weight, self.seen = torch.zeros(3), 0.0, []

    def on_train_batch_start(self, batch, batch_idx):
        self.weight += 0.01
        self.seen.append((self.global_step, self.current_epoch, batch_idx, len(self.losses)))
        for group in self.optimizers().param_groups:
            group["lr"] = 0.02 + 0.001 * self.global_step
        batch[0].mul_(1 + torch.rand(()))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.net(inputs + 0.1 * torch.randn_like(inputs))
        with torch.no_grad():
            taught = self.teacher[0](inputs)
            self.memory = 0.9 * self.memory + 0.1 * scores.mean(0)
            self.center.lerp_(scores.float().mean(0), 0.1)
        self.accuracy.update(scores, labels)
        if self.global_step == 5:
            self.net.deep[0].bias.requires_grad_(False)
        loss = nn.functional.cross_entropy(scores - self.memory, labels)
        loss = loss + self.weight * (scores - taught - self.center).square().mean()
        self.losses.append(loss.item())
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss}

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for mean, value in zip(self.teacher[0].parameters(), self.net.parameters(), strict=True):
                mean.lerp_(value, 0.1)


class Rows(L.Callback):
    """Notes what it can see in each batch."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append((trainer.global_step, batch_idx, float(outputs["loss"]), metrics, pl_module.weight))


def run(callback, module=None, **arguments):
    module, rows = module or Everything(), Rows()
    trainer = fit(module, callback, rows, data=loader(images(128), shuffle=True), **arguments)
    return module, rows.rows, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("sgd", {}),
        ("adamw", {"gradient_clip_val": 0.1}),
        ("sgd", {"accumulate_grad_batches": 2, "max_epochs": 2}),
        ("adamw", {"precision": "bf16-mixed"}),
    ],
)
def test_the_run_is_the_one_that_tried_nothing(optimizer, arguments, depth):
    by_hand, expected, metrics = run(Frozen(depth), Everything(optimizer), **arguments)
    callback = Branching([2, 1, 0], depth)
    module, rows, others = run(callback, Everything(optimizer), **arguments)
    assert rows == expected
    assert metrics == others
    assert equal(by_hand, module)
    assert by_hand.losses == module.losses
    assert by_hand.seen == module.seen
    assert torch.equal(by_hand.memory, module.memory)
    # The branch at this depth is that run, too.
    first = arguments.get("accumulate_grad_batches", 1)
    losses = [loss for _, _, loss, _, _ in expected][first : first + len(callback.seen[depth])]
    assert callback.seen[depth] == losses


def test_callbacks_and_loggers_see_no_branch():
    calls = []

    class Counting(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            calls.append(trainer.global_step)

    fit(Everything(), Branching([1, 0], 1), Counting(), data=loader(images(128)))
    assert calls == list(range(48))


def test_an_error_in_a_branch_leaves_the_run_as_it_was():
    module, before = Everything(), []

    class AfterFirst(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            before.append(copy.deepcopy(pl_module.state_dict()))

    with pytest.raises(KeyError, match="for the test"):
        run(Branching([0], 1, fails=True), module)
    with pytest.raises(KeyError, match="for the test"):
        fit(module := Everything(), Branching([0], 1, fails=True), AfterFirst(), data=loader(images(128)))
    assert len(before) == 1
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before[0].items())


def test_an_epoch_that_ends_is_no_branch():
    class Ends(Everything):
        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            return -1 if batch_idx == 4 else None

    (by_hand, expected, _), callback = run(Frozen(1), Ends()), Branching([2, 1], 1)
    module, rows, _ = run(callback, Ends())
    assert callback.seen == {2: None, 1: None}
    assert rows == expected
    assert equal(by_hand, module)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_a_batch_without_a_loss_has_none_in_a_branch():
    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    callback = Branching([1], 1)
    fit(Skips(), callback, data=loader(images(128)))
    assert [loss == -torch.inf for loss in callback.seen[1]] == [False, False, True, False, False, False]


def test_manual_optimization_cannot_be_tried():
    class Manual(Classifier):
        automatic_optimization = False

    for module, expected in ((Classifier(), True), (Manual(), False)):
        module.automatic_optimization = expected
        trainer = L.Trainer(accelerator="cpu", logger=False)
        trainer.strategy.connect(module)
        assert Branches.possible(trainer) is expected
