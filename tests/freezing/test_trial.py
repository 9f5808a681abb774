"""The trial of depths that pre-trained weights begin with."""

import contextlib
import copy
import dataclasses
import logging
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.core.training import feed
from lightning_egeria.freezing import loss_limits, trial_plan
from lightning_egeria.freezing.loss_limits import LIMITS
from lightning_egeria.freezing.trial import Frontier, worth
from support.models import (
    After,
    Classifier,
    ConvNet,
    ManualSteps,
    Transformer,
    bright,
    equal,
    fit,
    images,
    loader,
    mlp,
    tokens,
    vectors,
)

STEPS = 48  # in three epochs
FALLS = {0: 0.1025, 1: 0.1, 2: 0.05}  # in a step, by depth; 2 is worth 0.66 of 1, and 1 is worth 0.98 of 0
FIRST = 1  # depth that a trial of ConvNet begins with
FASTEST = LIMITS[-1].points  # all freezes that may
STAYS_DEEP = 99  # a trial stays at its first depth


@pytest.fixture(autouse=True)
def _any_trial_is_cheap(monkeypatch):
    monkeypatch.setattr(trial_plan, "BUDGET", 100.0)
    deep = dataclasses.replace(LIMITS[-1], points=STAYS_DEEP, progress=1e-6)
    monkeypatch.setattr(loss_limits, "LIMITS", (*LIMITS, deep))


def pretrained(max_loss_points=0.0, **arguments):
    policy = FreezingPolicy(pretrained=True)
    return KnowledgeGuidedFreezing(policy, max_loss_points=max_loss_points, background=False, **arguments)


def history(callback):
    return [(event.step, event.depth) for event in callback.events]


class Steady(Classifier):
    """Its loss falls in each step by what ``falls`` says for the frozen depth, whatever its weights are."""

    def __init__(self, falls, blocks=4):
        torch.manual_seed(0)
        super().__init__(mlp(blocks=blocks), lr=1e-9)
        self.falls = falls
        self.register_buffer("fallen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * 0 + 5.0 - self.fallen
        frozen = sum(not part.weight.requires_grad for part in self.net[:-1:2])
        self.fallen += self.falls.get(frozen, 0.0)
        return loss


def steady(callback, falls):
    fit(Steady(falls), callback, data=loader(vectors(128)))
    return callback


def train(module, *callbacks, **arguments):
    return fit(module, *callbacks, data=loader(bright(128)), **arguments)


def test_it_stays_where_going_shallower_no_longer_pays():
    callback = steady(pretrained(), FALLS)
    assert history(callback) == [(2, 1)]
    assert callback.events[-1].reason == (
        "loss 4.52 with 2 frozen, 4.24 with 1, 4.23 with 0; steps are worth 0.66 of those with 1, 0.98 of those with 0"
    )
    assert callback.active_policy.depth == callback.frozen_depth == 1
    assert callback.frontier.losses == pytest.approx({2: 4.52, 1: 4.245, 0: 4.23125})
    assert callback.frontier.worth == pytest.approx({1: (2.5 + 5.5 / 2) / 8, 0: (2.5 + 5.5 / 1.025) / 8})


def test_the_savings_know_what_a_full_step_costs():
    callback = steady(pretrained(), {0: 0.3, 1: 0.101, 2: 0.1})
    savings = callback.savings()
    batches = STEPS - 2  # the first two were full ones
    saved = (savings.step_seconds_before - savings.step_seconds_after) * batches - savings.evaluation_seconds
    assert savings.step_seconds_before > 0
    assert savings.evaluation_seconds > 0
    assert savings.seconds_saved == pytest.approx(saved)


def test_it_does_not_look_behind_a_depth_that_does_not_pay():
    assert history(steady(pretrained(), {0: 0.3, 1: 0.101, 2: 0.1})) == [(2, 2)]


@pytest.mark.parametrize(("points", "depth"), [(0, 1), (1.9, 1), (2, 1), (5, 1), (12, 3)])
def test_a_larger_accepted_loss_stays_deeper(points, depth):
    callback = steady(pretrained(points), FALLS)
    assert callback.frozen_depth == depth
    assert callback.savings().points_lost_in_proof == max(one.points for one in LIMITS if one.points <= points)


def test_a_share_above_what_steps_are_worth_goes_on(monkeypatch):
    monkeypatch.setattr(loss_limits, "LIMITS", (dataclasses.replace(LIMITS[0], progress=0.99),))
    assert history(steady(pretrained(), FALLS)) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_run_after_it_is_the_one_frozen_by_hand(seed):
    """Bit for bit: the trial leaves nothing but the depth."""
    torch.manual_seed(seed)
    start = ConvNet()
    module, callback = Classifier(copy.deepcopy(start)), pretrained()
    train(module, callback)
    scripted = Classifier(copy.deepcopy(start))
    schedule = {2: callback.frozen_depth} if callback.frozen_depth else {}
    train(scripted, KnowledgeGuidedFreezing(ScriptedPolicy(schedule), background=False))
    assert next(iter(callback.frontier.losses)) == FIRST
    assert equal(module, scripted)


class Reads(Classifier):
    """Looks at the Trainer's callbacks and logger in each step."""

    def training_step(self, batch, batch_idx):
        (callback,) = [one for one in self.trainer.callbacks if isinstance(one, KnowledgeGuidedFreezing)]
        folder = Path(self.logger.log_dir, self.trainer.checkpoint_callback.monitor, self.logger.experiment.log_dir)
        assert folder.parts
        return super().training_step(batch, batch_idx) * float(callback.evaluation_samples > 0)


def test_a_step_reads_callbacks_and_the_logger(tmp_path):
    torch.manual_seed(0)
    start, modules = ConvNet(), []
    for policy in (FreezingPolicy(pretrained=True), ScriptedPolicy({2: FIRST})):
        modules.append(Reads(copy.deepcopy(start)))
        folder = tmp_path / f"{len(modules)}"
        saves, logger = ModelCheckpoint(folder / "saved", monitor="loss", every_n_epochs=9), CSVLogger(folder)
        points = STAYS_DEEP if isinstance(policy, FreezingPolicy) else 0
        callback = KnowledgeGuidedFreezing(policy, max_loss_points=points, background=False)
        train(modules[-1], callback, saves, logger=logger, enable_checkpointing=True)
        assert history(callback) == [(2, FIRST)]
    assert equal(*modules)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_run_through_the_cache_is_the_run_without(tmp_path, workers):
    def net():
        torch.manual_seed(1)
        return ConvNet(dropout=0)

    plain, callback = Classifier(net()), pretrained()
    source = loader(images(128), shuffle=True, num_workers=workers)
    fit(plain, callback, data=source)
    data = FrozenPrefixCache(source, cache_dir=tmp_path, min_free_bytes=0)
    cached, other = Classifier(net()), pretrained()
    fit(cached, other, data=data)
    assert history(callback) == history(other) == [(2, FIRST)]
    assert callback.frontier.losses == other.frontier.losses
    assert data.stats.hits > 128
    assert plain.losses == cached.losses
    assert equal(plain, cached)


def test_the_depth_stays():
    class Falling(Classifier):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 11, gamma=0.01)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callback = pretrained(STAYS_DEEP, evaluate_every_n_steps=1)
    train(Falling(ConvNet(dropout=0), lr=0.2), callback)
    assert history(callback) == [(2, FIRST)]
    assert callback.savings().evaluations_done == 0


def test_it_begins_after_the_second_step_with_accumulation_too():
    callback = pretrained(STAYS_DEEP)
    fit(Classifier(ConvNet(dropout=0)), callback, data=loader(bright(160)), accumulate_grad_batches=2)
    assert history(callback) == [(2, FIRST)]
    assert callback.frontier.losses
    assert callback.savings().step_seconds_before > 0


def test_where_nothing_learns_plasticity_decides(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    callback = steady(pretrained(), {0: -0.1, 1: -0.1, 2: -0.1})
    assert "step 2: nothing freezes: no depth learned anything in the trial, so plasticity decides" in caplog.text
    assert not callback.active_policy.trial
    assert history(callback)[0][0] > 16  # after two evaluations


def test_manual_optimization_compares_layers():
    class Manual(ManualSteps, Classifier):
        pass

    callback = pretrained(evaluate_every_n_steps=1)
    train(Manual(), callback)
    assert not callback.active_policy.trial
    assert all("tried" not in event.reason for event in callback.events)


class Waiting(Classifier):
    """Its learning rate is 0 in the first steps."""

    def __init__(self, steps):
        super().__init__(ConvNet(dropout=0))
        self.steps = steps

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step >= self.steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("ends", [EarlyStopping("loss", strict=False), Timer("00:01:00:00"), None])
def test_a_run_that_may_end_counts_as_ten_epochs(caplog, ends):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    module = Classifier(ConvNet(dropout=0))
    stops = After(lambda trainer, _: setattr(trainer, "should_stop", True), 20)
    callbacks = [pretrained(STAYS_DEEP), stops, *([ends] if ends is not None else [])]
    fit(module, *callbacks, data=loader(bright(400)), epochs=-1 if ends is None else 1000)
    assert "a trial of depths takes the next 10 steps" in caplog.text  # a forty-eighth of 500


def test_it_waits_for_a_learning_rate():
    callback = pretrained(STAYS_DEEP)
    train(Waiting(5), callback)
    assert history(callback) == [(6, FIRST)]


@pytest.mark.parametrize(("waits", "begins", "told"), [(9, 10, 6), (10, 16, 8)])
def test_it_waits_for_an_epoch_with_enough_steps(caplog, waits, begins, told):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    callback = pretrained(STAYS_DEEP)
    train(Waiting(waits), callback)
    assert history(callback) == [(begins, FIRST)]
    assert f"a trial of depths takes the next {told} steps" in caplog.text


@pytest.mark.parametrize(("batches", "depth", "reason"), [(5, FIRST, "loss "), (3, 2, "batches are too large to keep")])
def test_its_batches_fit_into_memory(monkeypatch, batches, depth, reason):
    monkeypatch.setattr(feed, "MOST_BYTES", batches * 8 * (64 * 4 + 8))
    callback = pretrained(STAYS_DEEP)
    train(Classifier(ConvNet(dropout=0)), callback)
    assert history(callback) == [(2, depth)]
    assert reason in callback.events[0].reason


def test_it_follows_an_epoch_that_ends_within():
    class Unknown(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([images(128)[at] for at in range(40)])

    callback = pretrained()
    fit(Classifier(ConvNet(dropout=0)), callback, data=DataLoader(Unknown(), 8))
    assert history(callback) == [(2, FIRST)]
    assert (
        "the epoch ended while depths were tried, so the frozen share is the largest one" in callback.events[0].reason
    )


def test_an_epoch_too_short_for_it_freezes_what_the_limits_allow():
    callback = pretrained(2)
    fit(Classifier(ConvNet(dropout=0)), callback)
    assert history(callback) == [(2, FIRST)]
    assert callback.events[0].reason == (
        "trained weights: an epoch of 5 steps is too short to try depths, so the frozen share is the largest one that "
        "cost at most 2 points on the tasks of the proof. Compare with a run with freeze_until=0"
    )


def test_the_fastest_run_tries_nothing():
    callback = pretrained(FASTEST)
    train(Classifier(ConvNet(dropout=0)), callback)
    assert history(callback) == [(2, callback.freezer.chain.max_depth)]
    assert callback.frontier is None
    assert "max_loss_points accepts any depth" in callback.events[0].reason


def test_where_nothing_may_freeze_untried_it_says_so(caplog):
    """The first of two layer modules has half of the weights, which is more than a quarter."""
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    callback = pretrained()
    fit(Classifier(mlp(blocks=2)), callback, data=loader(vectors(40)))
    assert history(callback) == []
    assert "nothing freezes: an epoch of 5 steps is too short to try depths" in caplog.text
    assert callback.savings().points_lost_in_proof is None


@pytest.mark.parametrize("steps", [0, 20])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, steps):
    """Whether the trial was before the checkpoint or comes later."""
    runs = []
    for arguments in ({}, {"ckpt_path": tmp_path / "saved"}):
        torch.manual_seed(0)
        module, callback = Waiting(steps), pretrained(STAYS_DEEP, deterministic=True)
        saves = After(lambda trainer, _: trainer.save_checkpoint(tmp_path / "saved"), 16)
        fit(module, callback, *(() if arguments else (saves,)), data=loader(bright(128)), **arguments)
        runs.append((module, callback))
    (whole, first), (resumed, second) = runs
    assert history(first) == history(second) == [(max(2, steps + 1), FIRST)]
    assert equal(whole, resumed)


class Stateful(DataLoader):
    """A loader that keeps its own position, as `torchdata` has them."""

    def state_dict(self):
        return {"position": 0}

    def load_state_dict(self, state):
        """It has none."""


@pytest.mark.parametrize(
    ("kind", "step", "warns"), [(Stateful, 4, True), (Stateful, 12, False), (DataLoader, 4, False)]
)
def test_a_loader_that_is_ahead_in_a_checkpoint_is_told(tmp_path, kind, step, warns):
    saves = After(lambda trainer, _: trainer.save_checkpoint(tmp_path / "saved"), step)
    with pytest.warns() if warns else contextlib.nullcontext() as told:
        fit(Classifier(ConvNet(dropout=0)), pretrained(STAYS_DEEP), saves, data=kind(bright(128), 8))
    found = [str(one.message) for one in told or () if "stores its own position" in str(one.message)]
    assert [text.partition("which is ")[2].partition(" of")[0] for text in found] == ["6 batches ahead"] * warns


@pytest.mark.filterwarnings("ignore:freezing. nothing froze")
def test_from_scratch_there_is_none():
    callback = KnowledgeGuidedFreezing(background=False)
    fit(Classifier(), callback)
    assert callback.events == []
    assert callback.frontier is None


def test_the_log_says_what_was_tried(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    steady(pretrained(), FALLS)
    assert "a trial of depths takes the next 8 steps, and training then repeats them" in caplog.text
    assert "step 2: froze 1 of 4 layer modules, up to 'net.0': loss 4.52 with 2 frozen" in caplog.text


@pytest.mark.parametrize(
    ("losses", "depth"),
    [
        ([(3, [4, 1.0]), (2, [4, math.nan])], 3),
        ([(3, [4, math.nan]), (2, [4, 1.0])], 2),
        ([(3, [4, math.inf]), (2, [4, math.nan])], 3),
        ([(3, [4, 5.0]), (2, [4, 5.5])], 3),
        ([(3, [4, 5.0]), (2, [4, 4.0])], 2),
    ],
)
def test_a_loss_that_is_not_finite_never_wins(losses, depth):
    frontier = Frontier(0.95)
    for tried in losses:
        frontier.add(*tried)
    assert frontier.depth == depth


@pytest.mark.parametrize("rate", [0.02, 0.2])
@pytest.mark.parametrize("slower", [0.7, 0.9, 1.0])
@pytest.mark.parametrize("length", [8, 16, 64])
def test_worth_is_how_much_slower_a_branch_learns(rate, slower, length):
    """However steep the curve is and however long the branches are."""
    fast = [math.exp(-rate * step) for step in range(length)]
    slow = [math.exp(-rate * slower * step) for step in range(length)]
    assert worth(fast, fast) == worth(fast, slow) == 1
    # A window reaches back from the end: its middle is at three quarters of the steps.
    assert worth(slow, fast) == pytest.approx(1 - 0.75 * (1 - slower), abs=0.06)
    assert worth(slow, fast) <= 1


def test_worth_has_a_floor_and_takes_noise():
    assert worth([5.0] * 8, [5.0 - step / 10 for step in range(8)]) == 0.5
    assert worth([5.0] * 8, [6.0] * 8) == 1
    assert worth([4.0, 4.2, 3.9, 4.1], [4.0, 4.3, 3.7, 4.0]) < 1
    assert worth([1.0], [0.5]) == 1.0 or worth([1.0], [0.5]) > 0


@pytest.mark.parametrize(("points", "depth"), [(0, 1), (1, 1), (2, 2), (5, 2)])
def test_a_run_too_short_for_a_trial_freezes_what_the_limits_allow(monkeypatch, points, depth):
    """Of four layer modules with as many weights: a quarter, a third, half, two thirds."""
    monkeypatch.setattr(trial_plan, "BUDGET", 0.05)
    callback = steady(pretrained(points), {0: 0.3, 2: 0.1})
    assert history(callback) == [(2, depth)]
    cost = f"at most {points} points" if points else "nothing"
    assert (
        f"too short to try depths, so the frozen share is the largest one that cost {cost} on"
        in callback.events[-1].reason
    )
    assert callback.frontier is None
    assert callback.active_policy.depth == depth
    assert callback.savings().points_lost_in_proof == points
    assert callback.savings().step_seconds_before > 0
    assert not callback.will_compare(1)


def test_shares_of_a_text_network_are_shares_of_its_layers(monkeypatch):
    """A table of words, and four layers behind it: half of five would be the table and one layer."""
    monkeypatch.setattr(trial_plan, "BUDGET", 0.05)
    callback = pretrained(2)
    fit(Classifier(Transformer(layers=4)), callback, data=loader(tokens()))
    assert callback.layer_modules[0] == "net.embedding"
    assert [layer.split(".")[1] for layer in callback.layer_modules[1:]] == ["layers"] * 4
    assert history(callback) == [(2, 3)]


def test_where_the_budget_ends_a_quarter_is_the_most(monkeypatch):
    """With 8 layer modules it begins with 5; the second depth is affordable and better, the third one is not."""
    monkeypatch.setattr(trial_plan, "BUDGET", 0.25)
    callback = pretrained()
    fit(Steady({5: 0.1, 3: 0.2, 1: 0.3, 0: 0.31}, blocks=8), callback, data=loader(vectors(128)))
    assert list(callback.frontier.losses) == [5, 3]
    assert history(callback) == [(2, 2)]
    assert callback.events[-1].reason.endswith(
        "of those with 3; shallower depths would cost too much to try, and max_loss_points allows 2 without a trial"
    )
