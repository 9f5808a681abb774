"""A fit with a tuner: branches are exact, the best one's work is kept, and nobody else sees a trial."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics.classification import MulticlassAccuracy

from lightning_egeria import BranchTuner, Choice, CustomTunable, KnowledgeGuidedFreezing, LogUniform, PrefixFreezing
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.errors import ArgumentError, CheckpointError, UnsupportedError
from support import tuning as tally
from support.models import Classifier, ConvNet, ManualSteps, Validated, bright, equal, fit, images, left_behind, loader
from support.ranks import all_well, in_ranks
from support.tuning import Planned

SAME = {"lr": Choice([0.05])}


def tuner(spaces=None, **arguments):
    return BranchTuner(spaces or {"lr": LogUniform(1e-3, 1)}, **{"first_steps": 2, "max_share": 100} | arguments)


class Noted(Classifier):
    """With a metric, a log and a schedule by steps."""

    def __init__(self, optimizer="sgd"):
        torch.manual_seed(0)
        super().__init__(ConvNet(), optimizer=optimizer)
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy.update(torch.zeros(len(batch[1]), 3), batch[1])
        self.log("train/loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


class Manual(ManualSteps, Classifier):
    pass


VARIANTS = {
    "momentum": (Noted, {}, {}),
    "adamw": (lambda: Noted("adamw"), {}, {}),
    "bf16": (Noted, {"precision": "bf16-mixed"}, {}),
    "accumulation": (Noted, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {}),
    "shuffled": (Noted, {}, {"shuffle": True}),
    "manual": (Manual, {}, {}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_setting_trains_bit_for_bit_as_without(name):
    make, arguments, options = VARIANTS[name]
    plain, tuned = make(), make()
    first = fit(plain, data=loader(images(80), **options), epochs=2, **arguments)
    callback = tuner({"lr": Choice([0.05]), "dropout": Choice([0.2])}, at_epochs=(0, 1), first_steps=3)
    second = fit(tuned, callback, data=loader(images(80), **options), epochs=2, **arguments)
    assert callback.search_steps >= 3
    assert first.global_step == second.global_step
    assert tuned.losses == plain.losses
    assert equal(plain, tuned)
    assert left_behind(tuned) == []
    assert "log" not in vars(tuned)


@pytest.mark.slow
def test_workers_load_the_batches_of_training():
    plain, tuned = Noted(), Noted()
    options = {"shuffle": True, "num_workers": 2, "persistent_workers": True}
    fit(plain, data=loader(**options))
    fit(tuned, tuner({"lr": Choice([0.05])}, at_epochs=(0, 1, 2)), data=loader(**options))
    assert tuned.losses == plain.losses
    assert equal(plain, tuned)


def branches(*rates, **arguments):
    callback = tuner(searcher=Planned(*({"lr": rate} for rate in rates)), at_epochs=(2,), **arguments)
    module = Classifier()
    fit(module, callback)
    return callback, module


def test_the_winner_ends_where_a_run_with_its_setting_does():
    """Whatever was tried before: the same run by hand, which changes the rate at the start of the epoch."""

    class ByHand(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                trainer.optimizers[0].param_groups[0]["lr"] = rate

    callback, tuned = branches(0.2, 0.8, 1e-3, 100.0)
    record = callback.searches[0]
    rate = record.setting["lr"]
    assert record.winner > 0
    by_hand = Classifier()
    fit(by_hand, ByHand())
    assert tuned.losses == by_hand.losses
    assert equal(tuned, by_hand)
    again, other = branches(1e-3, rate)
    assert again.setting == callback.setting
    assert equal(tuned, other)
    speeds = [{one["setting"]["lr"]: one["speed"] for one in run.searches[0].branches} for run in (callback, again)]
    assert speeds[0][rate] == speeds[1][rate]
    assert speeds[0][1e-3] == speeds[1][1e-3]


def test_a_setting_that_ends_in_nan_leaves_nothing_behind():
    plain = Classifier()
    fit(plain)
    callback, module = branches(1e30, 1e38)
    labels = [one["label"] for one in callback.searches[0].branches]
    assert labels[1:] == ["diverged"] * 2
    assert callback.setting == {"lr": 0.05}
    assert equal(plain, module)


def test_out_of_memory_is_a_failed_branch():
    def allocate(trainer, value):
        trainer.lightning_module.size = value
        if value > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    class Sized(Classifier):
        size = 1

    plain, module = Classifier(), Sized()
    fit(plain)
    callback = tuner(
        {"size": CustomTunable(Choice([1, 2, 3]), lambda trainer: trainer.lightning_module.size, allocate)}
    )
    fit(module, callback)
    failed = [one["failed"] for one in callback.searches[0].branches if one["setting"]["size"] > 1]
    assert len(failed) == 2
    assert all(text.startswith("out of memory: CUDA out of memory") for text in failed)
    assert module.size == 1
    assert equal(plain, module)


class Broken(Classifier):
    fails = False

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise RuntimeError("injected")
        return super().training_step(batch, batch_idx)


def failing(*choices):
    def set_fails(trainer, value):
        if value == 2:
            raise ValueError("set wrongly")
        trainer.lightning_module.fails = value

    return CustomTunable(Choice([*choices]), lambda trainer: trainer.lightning_module.fails, set_fails)


def test_an_error_with_another_setting_is_a_failed_branch():
    module, plain = Broken(), Classifier()
    module.fails = 0
    fit(plain)
    callback = tuner({"fails": failing(0, 1)})
    fit(module, callback)
    assert [one["failed"] for one in callback.searches[0].branches] == [None, "RuntimeError: injected"]
    assert equal(module, plain)


@pytest.mark.parametrize(("present", "other", "message"), [(1, 0, "injected"), (0, 2, "set wrongly")])
def test_another_error_is_raised_from_the_beginning(present, other, message):
    module, plain = Broken(), Classifier()
    module.fails = present
    with pytest.raises((RuntimeError, ValueError), match=message):
        fit(module, tuner({"fails": failing(present, other)}))
    assert equal(module, plain)
    assert module.losses == []
    assert module.fails == present
    assert "log" not in vars(module)


def test_growing_accumulation_shortens_later_trials():
    callback = tuner(at_epochs=(0, 1, 2))
    fit(Classifier(), callback, GradientAccumulationScheduler({0: 1, 1: 3}), epochs=3)
    assert [search.trial_steps <= 5 for search in callback.searches] == [True] * 3
    assert callback.searches[1].trial_steps < callback.searches[0].trial_steps


def test_a_search_without_room_for_two_trials_is_left_out(caplog):
    callback = tuner(at_epochs=(0, 1), max_share=0.4, max_trials=4)
    fit(Classifier(), callback, epochs=3)
    assert len(callback.searches) == 1
    assert "no search, because two trials" in caplog.text


def test_a_plateau_scheduler_is_told_or_refused(caplog):
    class Plateau(Validated, Noted):
        def configure_optimizers(self):
            optimizer = Classifier.configure_optimizers(self)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            found = {"scheduler": scheduler, "monitor": "val/loss", "interval": self.interval}
            return {"optimizer": optimizer, "lr_scheduler": found}

    module = Plateau()
    module.interval = "step"
    with pytest.raises(UnsupportedError, match="interval='step'"):
        fit(module, tuner(SAME), data=loader(), val=loader())
    module, plain = Plateau(), Plateau()
    module.interval = plain.interval = "epoch"
    fit(plain, data=loader(), val=loader())
    fit(module, tuner(SAME), data=loader(), val=loader())
    assert "ReduceLROnPlateau follows 'val/loss'" in caplog.text
    assert equal(module, plain)


def test_nobody_else_sees_a_trial(tmp_path):
    class Counts(L.Callback):
        seen = 0

        def on_train_batch_end(self, trainer, *args):
            self.seen += 1
            assert trainer.global_step <= 15

    counts, callback = Counts(), tuner(at_epochs=(1,), max_trials=6)
    module = Noted()
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    fit(
        module,
        callback,
        counts,
        checkpoints,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    record = callback.searches[0]
    kept = record.trial_steps if record.winner is not None else 0
    assert counts.seen == 15 - kept
    assert len(module.losses) == 15
    (path,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    main = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert main == pytest.approx([*module.losses[:5], *module.losses[5 + kept :]])
    tried = [float(row["tuning/lr"]) for row in rows if row["tuning/lr"]]
    assert len(tried) >= len(record.branches)
    assert not any(row["train/loss"] and row["tuning/lr"] for row in rows)


class Augmented(torch.utils.data.Dataset):
    """Draws random numbers for each sample."""

    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.randn(1, 8, 8) + index % 3, index % 3


def test_trials_that_are_given_up_draw_no_random_numbers():
    """Training goes back, on batches that were read ahead."""
    plain, tuned = Classifier(lr=1e-9), Classifier(lr=1e-9)
    fit(plain, data=loader(Augmented()), epochs=1)
    callback = tuner({"lr": Choice([1e-9])}, first_steps=4)
    fit(tuned, callback, data=loader(Augmented()), epochs=1)
    assert callback.searches[0].winner is None
    assert tuned.losses == plain.losses


def test_no_trial_passes_a_validation():
    values = {}

    def run(name, *callbacks):
        module = Validated()
        values[name] = []
        module.on_validation_epoch_end = lambda: values[name].append(float(module.trainer.callback_metrics["val/loss"]))
        fit(module, *callbacks, data=loader(images(80)), val=loader(), val_check_interval=0.4)

    run("plain")
    run("tuned", tuner(SAME, first_steps=9))
    assert values["plain"] == values["tuned"]
    assert len(values["plain"]) == 6


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_fails_the_branch():
    plain, module = Classifier(), Classifier()
    fit(plain)
    callback = tuner({"lr": Choice([0.05, 1e30])})
    fit(module, callback, detect_anomaly=True)
    failed = [one["failed"] for one in callback.searches[0].branches]
    assert failed[1].startswith("not finite: Function '")
    assert module.losses == plain.losses


def test_a_trial_that_stops_training_does_not():
    class Stops(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.optimizers[0].param_groups[0]["lr"] > 1:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    assert fit(Stops(), tuner({"lr": Choice([0.05, 30.0])})).global_step == 15


def test_a_step_that_ends_the_epoch_is_refused_in_a_trial():
    class Ends(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    with pytest.raises(UnsupportedError, match="on_train_batch_start returned -1 in a trial") as raised:
        fit(Ends(), tuner(SAME, first_steps=4))
    assert raised.value.__notes__ == ["tuning: this was in a trial of lr=0.05"]


class InterruptedForTestError(Exception):
    pass


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # both runs write to it
@pytest.mark.parametrize("after", [0, 2])
def test_a_search_that_was_left_is_resumed(after, tmp_path):
    """As after kill -9 in a search: the last checkpoint is from before it."""
    trials = []

    def count(trainer, value):
        trials.append(value)
        if len(trials) == after + 1:
            raise InterruptedForTestError

    def run(interrupted, **arguments):
        values = Choice([0.0, 0.5, 0.9, 0.95, 0.8])
        option = {
            "momentum": CustomTunable(
                values,
                lambda trainer: trainer.optimizers[0].param_groups[0]["momentum"],
                lambda trainer, value: (
                    trainer.optimizers[0].param_groups[0].update(momentum=value),
                    count(trainer, value) if interrupted else None,
                ),
            )
        }
        module, callback = Classifier(ConvNet(dropout=0)), tuner(option, at_epochs=(1,))
        saves = ModelCheckpoint(tmp_path, save_last=True, enable_version_counter=False)
        fit(module, callback, saves, enable_checkpointing=True, **arguments)
        return module, callback

    torch.manual_seed(0)
    whole, expected = run(False)
    torch.manual_seed(0)
    with pytest.raises(InterruptedForTestError):
        run(True)
    resumed, callback = run(False, ckpt_path=tmp_path / "last.ckpt")
    assert equal(resumed, whole)
    assert callback.setting == expected.setting
    assert [one.branches for one in callback.searches] == [one.branches for one in expected.searches]


def test_a_checkpoint_within_a_trial_continues_the_search(tmp_path):
    """A signal handler saves in the middle of a trial; the checkpoint has the state before it, and what was tried."""

    class Saves(Classifier):
        saving = False

        def training_step(self, batch, batch_idx):
            tally.calls += 1
            if self.saving and tally.calls == 24:  # within a trial in epoch 1
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            return super().training_step(batch, batch_idx)

    def run(saving, **arguments):
        torch.manual_seed(0)
        tally.calls = 0
        module, callback = Saves(ConvNet(dropout=0)), tuner(at_epochs=(1,), max_trials=5)
        module.saving = saving
        fit(module, callback, **arguments)
        return module, callback

    whole, expected = run(True)
    state = torch.load(tmp_path / "within.ckpt", weights_only=True)
    assert state["global_step"] == 5
    finished = state["callbacks"]["BranchTuner"]["finished"]
    assert len(finished) >= 1
    steps = tally.calls
    resumed, callback = run(False, ckpt_path=tmp_path / "within.ckpt")
    assert tally.calls < steps - 5
    assert callback.setting == expected.setting
    assert equal(resumed, whole)


def test_no_better_validation_begins_a_search_and_ends_training():
    callback = tuner(monitor="val/loss", at_epochs=(), patience=2, stop_patience=5)
    module = Validated(lr=1e-12)

    def constant(batch, batch_idx):
        module.log("val/loss", 1.0)

    module.validation_step = constant
    trainer = fit(module, callback, EarlyStopping("val/loss", patience=50), val=loader(), epochs=20)
    assert [record.step for record in callback.searches] == [15, 25]
    assert all("no better val/loss" in record.reason for record in callback.searches)
    assert trainer.current_epoch == 6


def test_a_missing_monitor_is_named():
    with pytest.raises(ArgumentError, match=r"monitor='val/acc' was not logged.*val/loss"):
        fit(Validated(), tuner(SAME, monitor="val/acc"), val=loader())


def test_the_frozen_depth_is_tuned_and_rolled_back():
    freezing = PrefixFreezing()
    callback = tuner({"frozen_depth": Choice([0, 1, 2])}, first_steps=1)
    module = Classifier()
    fit(module, callback, freezing)
    record = callback.searches[0]
    assert record.step == 1  # the first step finds the layer modules
    assert {one["setting"]["frozen_depth"] for one in record.branches} >= {0, 1}
    assert freezing.frozen_depth == (record.setting["frozen_depth"] if record.winner is not None else 0)
    assert left_behind(module) == []
    with pytest.raises(UnsupportedError, match="Add PrefixFreezing"):
        fit(Classifier(), tuner({"frozen_depth": Choice([0, 1])}))


@pytest.mark.filterwarnings("ignore:freezing. nothing froze")
def test_idle_beside_freezing_it_changes_nothing():
    plain, tuned = Classifier(), Classifier()
    options = {"evaluate_every_n_steps": 1, "background": False, "deterministic": True}
    fit(plain, KnowledgeGuidedFreezing(**options))
    fit(tuned, KnowledgeGuidedFreezing(**options), tuner({"lr": Choice([0.05])}, at_epochs=()))
    assert equal(plain, tuned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"searcher": "best"}, "searcher must be one of compass, random, grid"),
        ({"max_trials": 0}, "max_trials must be an integer"),
        ({"first_steps": 0}, "first_steps must be an integer"),
        ({"max_share": 0}, "max_share must be a positive share"),
        ({"stop_patience": 3}, "stop_patience needs the name"),
        ({"tunables": {}}, "tunables must name"),
        ({"tunables": {"lr": [1, 2]}}, "the values of 'lr' must be Choice"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        BranchTuner(**{"tunables": SAME} | arguments)


def test_a_checkpoint_of_another_version_is_refused():
    with pytest.raises(CheckpointError, match="tuning state of version 9"):
        tuner().load_state_dict({"version": 9})
    with pytest.raises(CheckpointError, match="damaged"):
        tuner().load_state_dict({**tuner().state_dict(), "searches": [{"step": 1}]})


def test_an_epoch_of_one_batch_has_no_search():
    plain, module = Classifier(), Classifier()
    fit(plain, data=loader(images(8)))
    with pytest.warns(UserWarning, match="no search: a trial must end before the next validation"):
        fit(module, tuner(), data=loader(images(8)))
    assert equal(plain, module)


def on_a_rank():
    torch.manual_seed(0)
    module, callback = Classifier(ConvNet(dropout=0)), tuner({"lr": Choice([0.05])}, at_epochs=(0, 1))
    plain = Classifier(ConvNet(dropout=0))
    plain.load_state_dict(module.state_dict())
    fit(module, callback, data=loader(images(80)), devices=2, strategy="ddp")
    fit(plain, data=loader(images(80)), devices=2, strategy="ddp")
    several = tuner(at_epochs=(1, 2), max_trials=4)
    other = Classifier(ConvNet(dropout=0))
    fit(other, several, data=loader(bright()), devices=2, strategy="ddp")
    records = [{**one.state(), "seconds": None} for one in several.searches]
    slow = Classifier(ConvNet(dropout=0), lr=1e-12)
    sizes = BranchTuner(
        {"lr": Choice([0.02]), "batch_size": Choice([4])}, first_steps=2, max_share=100, searcher="grid"
    )
    steps = fit(slow, sizes, data=loader(bright()), devices=2, strategy="ddp").global_step
    changed = [sizes.setting, steps, digest(dict(slow.named_parameters()))]
    return equal(module, plain), digest(dict(other.named_parameters())), records, changed


def test_two_ranks_train_one_setting_as_without_and_agree():
    first, second = all_well(in_ranks(2, on_a_rank))
    assert first == second
    exact, _, records, (setting, steps, _) = first
    assert exact
    assert setting == {"lr": 0.02, "batch_size": 4}
    assert steps == 3 * 10
    assert any(record["winner"] for record in records)
