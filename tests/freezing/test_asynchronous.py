"""The callback with worker processes: the same result, whatever becomes of them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy, SlopePolicy
from support import models
from support.leftovers import REPOSITORY
from support.models import equal, images, loader, slow


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 3))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Deciding(SlopePolicy):
    """Decides early, and remembers what it was told."""

    def __init__(self, tolerance=0.9, refresh=1):
        super().__init__(
            tolerance, window_evaluations=2, patience=2, bootstrap=False, refresh_every_n_evaluations=refresh
        )
        self.seen = []

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        if plasticity is not None:
            self.seen.append((step, tuple(plasticity)))
        return super().observe(step, plasticity, learning_rate, loss, layer_shares)


class Each(L.Callback):
    """Call `look(trainer, module)` after each batch."""

    def __init__(self, look):
        self.look = look

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.look(trainer, pl_module)


def fit(*callbacks, epochs=6, module=None, ckpt_path=None):
    torch.manual_seed(0)
    module = module or Module()
    models.fit(module, *callbacks, data=loader(images(size=6)), epochs=epochs, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("precision", ["float32", slow("bf16")])
def test_a_deterministic_run_with_a_worker_is_the_inline_run(precision):
    runs = []
    for background in (False, True):
        callback = KnowledgeGuidedFreezing(
            Deciding(),
            evaluate_every_n_steps=1,
            background=background,
            deterministic=True,
            reference_precision=precision,
        )
        runs.append((fit(callback), callback))
    (inline, first), (process, second) = runs
    assert first.events == second.events
    assert first.events[-1].depth > 0
    assert str(first.active_policy.seen) == str(second.active_policy.seen)  # with NaN, which is not equal to itself
    assert len(first.active_policy.seen) > 5
    assert equal(inline, process)


@pytest.mark.parametrize(
    ("at", "precision"),
    [(5, "float32"), (15, "float32"), (20, "float32"), slow(5, "bf16"), (15, "bf16"), slow(20, "bf16")],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, at, precision):
    def callback():
        return KnowledgeGuidedFreezing(
            Deciding(tolerance=0.5, refresh=3),
            evaluate_every_n_steps=2,
            background=False,
            deterministic=True,
            reference_precision=precision,
        )

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.global_step == at:
                trainer.save_checkpoint(path)

    path = tmp_path / "half.ckpt"
    whole = callback()
    expected = fit(whole, Saves())
    assert torch.load(path, weights_only=True)["global_step"] == at
    resumed = callback()
    found = fit(resumed, ckpt_path=path)

    assert whole.events
    assert resumed.events == whole.events
    later = [entry for entry in whole.active_policy.seen if entry[0] > at]
    assert later
    assert str(resumed.active_policy.seen) == str(later)  # with NaN, which is not equal to itself
    assert resumed.savings().evaluations_done == whole.savings().evaluations_done
    assert equal(expected, found)


@pytest.mark.parametrize("at", [5, 45, 50])
def test_a_run_that_is_resumed_while_statistics_settle(tmp_path, at):
    class Slow(Module):
        def __init__(self):
            super().__init__()
            for number in (1, 4, 7):
                self.net[number].momentum = 0.02

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.global_step == at:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    class Modes(Each):
        def __init__(self):
            super().__init__(lambda trainer, module: self.seen.update({trainer.global_step: module.net[4].training}))
            self.seen = {}

    def callback():
        return KnowledgeGuidedFreezing(ScriptedPolicy({3: 1, 8: 2, 60: 0}), background=False)

    modes, resumed_modes = Modes(), Modes()
    expected = fit(callback(), modes, Saves(), module=Slow(), epochs=13)
    found = fit(callback(), resumed_modes, module=Slow(), epochs=13, ckpt_path=tmp_path / "half.ckpt")
    assert [step for step, training in modes.seen.items() if not training] == list(range(48, 60))
    assert resumed_modes.seen == {step: training for step, training in modes.seen.items() if step > at}
    assert found.net[4].momentum == 0.02
    assert equal(expected, found)


def test_a_resumed_reference_has_more_than_the_weights(tmp_path):
    class Keeps(Module):
        def __init__(self):
            super().__init__()
            self.losses, self.table = [], None

        def forward(self, images):
            if self.table is None:
                self.table = torch.linspace(0, 1, images.shape[-1])
            return self.net(images * self.table)

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.detach())
            return loss

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.losses.clear()
            if trainer.global_step == 15:
                trainer.save_checkpoint(path)

    def run(*callbacks, **arguments):
        torch.manual_seed(0)
        callback = KnowledgeGuidedFreezing(
            Deciding(tolerance=0.5), evaluate_every_n_steps=2, background=False, deterministic=True
        )
        return fit(callback, *callbacks, module=Keeps(), **arguments), callback

    path = tmp_path / "half.ckpt"
    expected, whole = run(Saves())
    found, resumed = run(Saves(), ckpt_path=path)
    assert resumed.events == whole.events != []
    assert equal(expected, found)


def test_a_run_goes_on_from_a_checkpoint_written_after_fit(tmp_path):
    def callback(background=False):
        return KnowledgeGuidedFreezing(
            Deciding(tolerance=0.5, refresh=3), evaluate_every_n_steps=2, background=background, deterministic=True
        )

    class Saves(L.Callback):
        def teardown(self, trainer, pl_module, stage):
            if trainer.global_step == 15:
                trainer.save_checkpoint(path)

    path = tmp_path / "after.ckpt"
    whole, first, resumed = callback(), callback(background=True), callback()
    expected = fit(whole)
    fit(first, Saves(), epochs=3)
    found = fit(resumed, ckpt_path=path)
    assert resumed.events == whole.events != []
    later = [entry for entry in whole.active_policy.seen if entry[0] > 15]
    assert str(resumed.active_policy.seen) == str(later)  # with NaN, which is not equal to itself
    assert equal(expected, found)
    fit(first, epochs=1)  # begins anew
    assert first.active_policy.seen[0][0] <= 4


def test_a_checkpoint_written_on_an_error_holds_the_reference():
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 7:
                raise RuntimeError("boom")

        def on_exception(self, trainer, pl_module, exception):
            kept.append(callback.state_dict()["method"]["comparison"])

    kept = []
    callback = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2, background=False, deterministic=True)
    with pytest.raises(RuntimeError, match="boom"):
        fit(callback, Fails())
    assert "net.0.weight" in kept[0]["reference"]
    assert [answer is not None for answer in kept[0]["pending"]] == [True]


def test_only_deterministic_checkpoints_hold_the_reference(tmp_path):
    path = tmp_path / "some.ckpt"

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(path)

    fit(KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2, background=False), Saves(), epochs=2)
    state = next(iter(torch.load(path, weights_only=True)["callbacks"].values()))
    assert state["method"]["comparison"]["reference"] is None
    callback = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=2, background=False)
    fit(callback, ckpt_path=path)
    assert callback.active_policy.seen


def test_a_killed_worker_is_told_once_and_replaced():
    pids = []

    def kill(trainer, pl_module):
        worker = callback.comparison.runner.worker
        if trainer.global_step in (8, 16):
            pids.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    callback = KnowledgeGuidedFreezing(
        Deciding(tolerance=1e-9), evaluate_every_n_steps=1, deterministic=True, background=True
    )
    with pytest.warns(
        UserWarning, match="reference model failed: the reference process ended with exit status -9"
    ) as told:
        fit(callback, Each(kill))
    assert len([w for w in told if "reference model" in str(w.message)]) == 1
    assert len(set(pids)) == 2
    savings = callback.savings()
    assert savings.evaluations_done > 20
    assert not callback.comparison.evaluations.stopped


def test_a_module_that_the_worker_cannot_import_is_told():
    class OnlyHere(Module):
        def __init__(self):
            super().__init__()
            self.owner = os.getpid()
            inner = self.net

            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.inner = inner

                def forward(self, x, owner=self.owner):
                    if os.getpid() != owner:
                        raise RuntimeError("not in this process")
                    return self.inner(x)

            self.net = Net()

    callback = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, deterministic=True, background=True)
    with pytest.warns(UserWarning, match="not in this process") as told:
        fit(callback, module=OnlyHere())
    told = [str(warning.message) for warning in told if "reference model" in str(warning.message)]
    assert ["no more layer modules will freeze" in text for text in told] == [False, True]
    assert callback.events == []


def test_an_error_in_training_leaves_no_process():
    seen = {}

    def fail(trainer, pl_module):
        seen["pid"] = callback.comparison.runner.worker.pid
        if trainer.global_step == 3:
            raise RuntimeError("the user's own")

    callback = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, background=True)
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(callback, Each(fail))
    with pytest.raises(ProcessLookupError):
        os.kill(seen["pid"], 0)
    assert "egeria-worker" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM, slow(signal.SIGKILL)])
def test_a_signal_to_the_trainer_leaves_no_process(tmp_path, number):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from tests.freezing.test_asynchronous import *
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        def look(trainer, pl_module):
            if trainer.global_step == 3:
                print(callback.comparison.runner.worker.pid, flush=True)
            time.sleep(0.01)
        callback = KnowledgeGuidedFreezing(Deciding(), evaluate_every_n_steps=1, background=True)
        fit(callback, Each(look), epochs=100000)
        """)
    )
    paths = [str(REPOSITORY), str(REPOSITORY / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as run:
        worker = int(run.stdout.readline())
        run.send_signal(number)
        try:
            run.wait(60)
        finally:
            run.kill()
    for _ in range(12_000):  # its priority is low
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the worker outlived its trainer")


def test_a_script_of_steps_needs_no_process():
    callback = KnowledgeGuidedFreezing(ScriptedPolicy({2: 1}))
    pids = []
    fit(callback, Each(lambda *_: pids.append(callback.comparison.runner.worker)), epochs=1)
    assert callback.frozen_depth == 1
    assert pids[-1] is None
