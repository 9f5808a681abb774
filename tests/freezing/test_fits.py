"""One fit after another, from checkpoints, with tuners and with averaged weights."""

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_egeria import ScriptedPolicy
from support.freezing.setups import ByHand, Filtering, Module, Watching, freezing, loader, new
from support.models import After, Classifier, equal, fit, images, left_behind, slow, trainer_of


class MeanTeacher(Classifier):
    """Copies its network in the first step, of all steps, while it is observed."""

    def __init__(self):
        super().__init__()
        self.teacher = None

    def training_step(self, batch, batch_idx):
        if self.teacher is None:
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        with torch.no_grad():
            for theirs, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                theirs.lerp_(own, 0.1)
            soft = self.teacher(batch[0])
        loss = nn.functional.mse_loss(self.net(batch[0]), soft + 1)
        self.losses.append(loss.item())
        return loss


def test_a_copy_made_in_the_first_step_computes_itself():
    def trained(*callbacks):
        module = MeanTeacher()
        fit(module, *callbacks, data=DataLoader(images(), 8))
        return module.losses, [p.tolist() for p in module.parameters()]

    assert trained() == trained(freezing(ScriptedPolicy({})))


@pytest.mark.parametrize("order", [1, -1])
def test_copies_that_other_callbacks_make_are_ordinary_modules(order, tmp_path):
    copies = []

    def look(trainer, pl_module):
        torch.save(pl_module.net, tmp_path / "net.pt")
        copies.extend([copy.deepcopy(pl_module.net), torch.load(tmp_path / "net.pt", weights_only=False)])

    callback = freezing(Watching())
    fit(new(), *[After(look, 2, 3, 4), callback][::order])
    assert callback.savings().evaluations_done > 2
    assert not any(left_behind(net) for net in copies)
    fit(new(), *[After(look, 6), freezing(ScriptedPolicy({4: 2}))][::order])
    assert not copies[-1].stem[1].training
    for net in copies:
        assert all(part.training for part in net.train().modules())


@pytest.mark.skipif(not hasattr(pl_callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
def test_ema_weights_are_swapped_in_for_validation_only():
    def ema():
        return pl_callbacks.EMAWeightAveraging(decay=0.9)

    class Validates(Module):
        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    plain, watched, callback = new(Validates), new(Validates), freezing(Watching())
    fit(plain, ema(), val=loader(8))
    fit(watched, ema(), callback, val=loader(8))
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)
    by_hand, by_callback = new(Validates), new(Validates)
    fit(by_hand, ema(), ByHand(), val=loader(8))
    fit(by_callback, ema(), freezing(ScriptedPolicy({4: 2})), val=loader(8))
    assert equal(by_hand, by_callback)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
@pytest.mark.skipif(not hasattr(pl_callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
def test_ema_and_what_is_frozen_go_on_after_a_restart(tmp_path):
    class Validates(Module):
        def __init__(self):
            super().__init__()
            self.net.middle[3].p = 0.0  # dropout draws other numbers after a restart

        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    def callbacks():
        return pl_callbacks.EMAWeightAveraging(decay=0.9), freezing(ScriptedPolicy({4: 2}))

    whole, half, resumed = (new(Validates) for _ in range(3))
    saves = pl_callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(whole, *callbacks(), val=loader(8), epochs=4)
    fit(half, *callbacks(), saves, val=loader(8), epochs=2, enable_checkpointing=True)
    fit(resumed, *callbacks(), val=loader(8), epochs=4, ckpt_path=saves.last_model_path)
    assert equal(whole, resumed)


@pytest.mark.filterwarnings("ignore:.*SWA")
def test_stochastic_weight_averaging():
    def swa():
        return pl_callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)

    plain, watched, callback = new(), new(), freezing(Watching())
    fit(plain, swa(), epochs=5)
    fit(watched, swa(), callback, epochs=5)
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)

    class ByHandUntilTheLastEpoch(ByHand):
        """In which running statistics of the averaged weights are measured, and nothing is trained."""

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.current_epoch < 5:
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            else:
                pl_module.train()

    by_hand, by_callback, callback = new(), new(), freezing(ScriptedPolicy({4: 2}))
    fit(by_hand, swa(), ByHandUntilTheLastEpoch(), epochs=5)
    fit(by_callback, swa(), callback, epochs=5)
    assert by_callback.net.stem[1].running_mean.any()
    assert equal(by_hand, by_callback)
    assert callback.savings().layer_modules[1].frozen_at_step == 4
    assert left_behind(by_callback) == []


@pytest.mark.filterwarnings("ignore:.*SWA")
def test_stochastic_weight_averaging_while_statistics_settle():
    module = new()
    norm = module.net.stem[1]
    norm.momentum = 0.01
    swa = pl_callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    fit(module, swa, freezing(ScriptedPolicy({4: 2})), epochs=5)
    assert norm.momentum == 0.01
    measured = norm.running_mean.clone(), norm.running_var.clone()
    norm.reset_running_stats()
    norm.momentum = None
    with torch.no_grad():
        for images, _ in loader():
            module.net.stem(images)
    torch.testing.assert_close(measured, (norm.running_mean, norm.running_var))


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
@pytest.mark.parametrize(
    ("kind", "script"), [(Module, {3: 2}), slow(Module, {12: 2}), slow(Filtering, {3: 2}), (Filtering, {12: 2})]
)
def test_resume_from_before_and_after_a_freeze(tmp_path, kind, script):
    class WithoutDropout(kind):  # which draws other numbers after a restart
        def __init__(self):
            super().__init__()
            self.net.middle[3].p = 0.0

    whole, parts, resumed = (new(WithoutDropout) for _ in range(3))
    fit(whole, freezing(ScriptedPolicy(script)), epochs=4)
    saves = pl_callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(parts, freezing(ScriptedPolicy(script)), saves, epochs=2, enable_checkpointing=True)
    callback, path = freezing(ScriptedPolicy(script)), saves.last_model_path
    fit(resumed, callback, epochs=4, ckpt_path=path)
    assert [(event.step, event.depth) for event in callback.events] == list(script.items())
    assert equal(whole, resumed)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_checkpoints_serve_runs_with_and_without_the_callback(tmp_path):
    paths = []
    for number, callbacks in enumerate(([], [freezing(ScriptedPolicy({3: 2}))])):
        saves = pl_callbacks.ModelCheckpoint(tmp_path / str(number), save_last=True)
        fit(new(), saves, *callbacks, epochs=2, enable_checkpointing=True)
        paths.append(saves.last_model_path)
    callback, without = freezing(ScriptedPolicy({12: 2})), new()
    fit(new(), callback, epochs=4, ckpt_path=paths[0])
    assert [(event.step, event.depth) for event in callback.events] == [(12, 2)]
    fit(without, epochs=4, ckpt_path=paths[1])
    for module in (without, Module.load_from_checkpoint(paths[1])):
        assert left_behind(module) == []
        assert all(part.training for part in module.net.modules())


def test_a_second_fit_of_everything_starts_with_nothing_frozen():
    callback, module = freezing(ScriptedPolicy({3: 2})), new()
    trainer = fit(module, callback)
    trainer.fit_loop.max_epochs = 5
    moved = []
    look = After(lambda _, m: moved.append(m.net.stem[0].weight.detach().clone()), 16, 25)
    before = module.net.stem[0].weight.detach().clone()
    trainer.callbacks.append(look)
    trainer.fit(module, loader())
    assert trainer.global_step == 25
    assert [(event.step, event.depth) for event in callback.events] == [(16, 2)]  # the script is behind by then
    assert not torch.equal(before, moved[0])
    assert torch.equal(moved[0], moved[1])
    assert left_behind(module) == []


def test_validating_testing_and_predicting_with_the_same_trainer():
    class Steps(Module):
        def validation_step(self, batch, batch_idx):
            assert not any(part.training for part in self.net.modules())
            return self.net(batch[0]).mean()

        test_step = predict_step = validation_step

    callback, module = freezing(ScriptedPolicy({3: 2})), new(Steps)
    trainer = trainer_of(callback)
    trainer.validate(module, loader(8), verbose=False)
    trainer.fit(module, loader(), loader(8))
    trainer.validate(module, loader(8), verbose=False)
    trainer.test(module, loader(8), verbose=False)
    trainer.predict(module, loader(8))
    assert callback.frozen_depth == callback.savings().frozen_depth == 2
    assert left_behind(module) == []


def test_a_checkpoint_that_is_only_tested_changes_nothing(tmp_path):
    class Steps(Module):
        def validation_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

        test_step = predict_step = validation_step

    callback, module = freezing(ScriptedPolicy({3: 2, 8: 1})), new(Steps)
    path = tmp_path / "early.ckpt"
    trainer = fit(module, callback, After(lambda trainer, _: trainer.save_checkpoint(path), 6), val=loader(8))
    before = copy.deepcopy((callback.state_dict(), callback.events))
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, loader(8), ckpt_path=path)
        assert (callback.state_dict(), callback.events) == before

    callback, module = freezing(ScriptedPolicy({})), new(Steps)
    trainer = trainer_of(callback, epochs=1)
    trainer.validate(module, loader(8), ckpt_path=path, verbose=False)
    front = module.net.stem[0].weight.detach().clone()
    trainer.fit(module, loader(), loader(8))
    assert callback.events == []
    assert not torch.equal(front, module.net.stem[0].weight)


def test_a_fit_that_failed_early_leaves_nothing_to_the_next(tmp_path):
    class Fails(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            raise RuntimeError("not today")

    path, script = tmp_path / "frozen.ckpt", ScriptedPolicy({3: 2})
    fit(new(), freezing(script), After(lambda trainer, _: trainer.save_checkpoint(path), 6))
    callback = freezing(script)
    with pytest.raises(RuntimeError, match="not today"):
        fit(new(), callback, Fails(), ckpt_path=path)
    seen = []
    fit(new(), callback, After(lambda *_: seen.append(callback.frozen_depth), 1))
    assert seen == [0]


@pytest.mark.parametrize(
    ("finder", "order"),
    [
        ("LearningRateFinder", 1),
        slow("LearningRateFinder", -1),
        slow("BatchSizeFinder", 1),
        ("BatchSizeFinder", -1),
    ],
)
def test_inert_while_callbacks_of_lightning_try_settings(finder, order):
    numbers = {"num_training_steps": 8} if finder == "LearningRateFinder" else {"max_trials": 2, "steps_per_trial": 2}
    callback, module = freezing(ScriptedPolicy({3: 2})), new()
    trainer = trainer_of(*[callback, getattr(pl_callbacks, finder)(**numbers)][::order])
    trainer.fit(module)
    assert [(event.step, event.depth) for event in callback.events] == [(3, 2)]
    assert left_behind(module) == []


def test_inert_while_the_tuner_tries_and_at_work_afterwards():
    callback, module = freezing(ScriptedPolicy({3: 2})), new()
    trainer = trainer_of(callback, max_steps=10)
    Tuner(trainer).lr_find(module, num_training=10)
    assert callback.events == []
    assert left_behind(module) == []
    Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    assert callback.events == []
    assert left_behind(module) == []
    trainer.fit(module)
    assert [(event.step, event.depth) for event in callback.events] == [(3, 2)]


def test_after_a_fit_and_the_tuner_a_second_fit_starts_anew(tmp_path):
    callback, module, seen = freezing(ScriptedPolicy({3: 2})), new(), {}
    fit(module, callback)
    look = After(lambda trainer, _: seen.update({trainer.global_step: callback.freezer.prefix.depth}))
    trainer = trainer_of(callback, look, max_steps=10, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(module, num_training=10)
    assert seen == {}
    trainer.fit(module)
    assert seen == {step: 2 * (step >= 3) for step in range(1, 11)}


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_a_second_fit_that_looks_for_a_learning_rate_starts_anew(tmp_path):
    if tuple(map(int, L.__version__.split(".")[:2])) < (2, 6):
        pytest.skip("before 2.6 LearningRateFinder ends the first fit before it trains, with or without the callback")
    callback, module = freezing(ScriptedPolicy({3: 2})), new()
    finder = pl_callbacks.LearningRateFinder(num_training_steps=8)
    trainer = trainer_of(callback, finder, epochs=1, default_root_dir=tmp_path)
    for max_epochs, step in ((1, 3), (2, 6)):  # the script is behind by then
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(module)
        assert [event.step for event in callback.events] == [step]


def test_inert_in_fast_dev_run_and_under_barebones_at_work():
    callback = freezing(ScriptedPolicy({1: 1}))
    fit(new(), callback, fast_dev_run=True)
    assert callback.events == []
    trainer = L.Trainer(barebones=True, max_epochs=1, accelerator="cpu", callbacks=[callback])
    trainer.fit(new(), loader())
    assert callback.frozen_depth == 1
