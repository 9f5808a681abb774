"""Every ordinary way to train: idle nothing changes, and frozen by the callback is frozen by hand."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FreezingPolicy, ScriptedPolicy
from lightning_egeria.errors import LayerChainError
from support.freezing.setups import (
    MUCH_ALIKE,
    SETUPS,
    ByHand,
    ChannelsLast,
    Checkpointed,
    Manual,
    Module,
    Watching,
    freezing,
    loader,
    new,
    trained,
    trained_plainly,
    validated,
)
from support.models import After, ConvNet, equal, fit, left_behind, slow

# Each is said about one way to train, by Lightning or torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
]

each_setup = pytest.mark.parametrize("setup", [slow(name) if name in MUCH_ALIKE else name for name in SETUPS])


@each_setup
def test_with_nothing_frozen_training_is_the_same_bit_for_bit(setup):
    callback = freezing(Watching())
    plain, watched = trained_plainly(setup), trained(setup, callback)
    assert callback.savings().evaluations_done >= 2  # else this would show nothing
    assert equal(plain, watched)
    assert left_behind(watched) == left_behind(plain)


@each_setup
def test_frozen_by_the_callback_is_frozen_by_hand_bit_for_bit(setup):
    callback = freezing(ScriptedPolicy({4: 2}))
    plain, by_hand, by_callback = trained_plainly(setup), trained(setup, ByHand()), trained(setup, callback)
    assert callback.frozen_depth == 2
    assert equal(by_hand, by_callback)
    assert not equal(plain, by_callback)
    assert left_behind(by_callback) == left_behind(plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_16_mixed_with_a_gradient_scaler():
    by_hand, by_callback = new(), new()
    fit(by_hand, ByHand(), precision="16-mixed", accelerator="cuda", devices=1)
    fit(by_callback, freezing(ScriptedPolicy({4: 2})), precision="16-mixed", accelerator="cuda", devices=1)
    assert equal(by_hand, by_callback)


def test_reentrant_checkpointing_is_refused_with_its_reason():
    class Reentrant(Checkpointed):
        reentrant = True

    with pytest.raises(LayerChainError, match="use_reentrant=False"):
        fit(new(Reentrant), freezing(Watching()))


def test_accumulation_that_changes_with_the_epoch():
    def more():
        return pl_callbacks.GradientAccumulationScheduler({0: 1, 1: 3})

    plain, watched, by_hand, by_callback = (new() for _ in range(4))
    callback = freezing(Watching())
    fit(plain, more())
    fit(watched, more(), callback)
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)
    fit(by_hand, more(), ByHand())
    fit(by_callback, more(), freezing(ScriptedPolicy({4: 2})))
    assert equal(by_hand, by_callback)


def test_parameters_that_the_user_froze_stay_frozen():
    module = new()
    module.net.stem[0].bias.requires_grad_(False)
    fit(module, freezing(ScriptedPolicy({3: 2, 6: 0})))
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["net.stem.0.bias"]


def test_shared_weights_freeze_together_or_not_at_all():
    class Twice(Module):
        def __init__(self):
            super().__init__()
            shared = nn.Linear(6, 6)
            self.net = nn.Sequential(nn.Linear(6, 6), shared, nn.ReLU(), nn.Linear(6, 6), shared, nn.Linear(6, 6))
            self.out = nn.Linear(6, 6)
            self.out.weight = self.net[0].weight

        def training_step(self, batch, batch_idx):
            return self.out(self.net(batch[0].flatten(1)[:, :6])).square().mean()

    callback = freezing(Watching())
    with pytest.warns(UserWarning, match="freezing: ") as told:
        fit(new(Twice), callback)
    told = sorted(text for warning in told if (text := str(warning.message)).startswith("freezing: "))
    assert ["runs between two calls of 'net.1' and freezes with it" in text for text in told] == [False, True]
    assert "Nothing from 'net.0' on can freeze" in told[0]
    assert callback.freezer.chain.max_depth == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_called_twice_freezes_with_all_between(precision):
    class Twice(Module):
        def __init__(self):
            super().__init__()
            linears = [nn.Linear(6, 6) for _ in range(6)]
            self.net = nn.Sequential(*linears[:3], linears[1], *linears[3:])

        def training_step(self, batch, batch_idx):
            return self.net(batch[0].flatten(1)[:, :6]).square().mean()

    seen, callback = [], freezing(ScriptedPolicy({4: 2}))
    look = After(
        lambda _, m: seen.append([n for n, p in m.net.named_parameters() if p.requires_grad]), 6
    )  # within an epoch
    with pytest.warns(UserWarning, match=r"'net\.2' runs between two calls of 'net\.1' and freezes with it"):
        fit(new(Twice), callback, look, precision=precision)
    assert seen == [[f"{number}.{kind}" for number in (4, 5, 6) for kind in ("weight", "bias")]]


def test_a_siamese_network_freezes():
    """Called for each of two views; its running statistics follow both."""

    class Siamese(Module):
        def training_step(self, batch, batch_idx):
            first, second = self.net(batch[0]), self.net(batch[0].flip(-1))
            return nn.functional.cross_entropy(first, batch[1]) + nn.functional.mse_loss(first, second)

    seen, callback = [], freezing(ScriptedPolicy({4: 2}))
    states = After(lambda _, m: seen.append({k: v.cpu().clone() for k, v in m.net.state_dict().items()}), 5)
    module = new(Siamese)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="freezing: ")
        fit(module, callback, states)
    assert callback.frozen_depth == 2
    frozen = callback.freezer.chain.members(2)
    after = {f"net.{name}": value for name, value in module.net.state_dict().items()}
    same = {name for name, value in seen[0].items() if value.equal(after[f"net.{name}"])}
    assert same == {name for name in seen[0] if f"net.{name}".rpartition(".")[0] in frozen}


class ChangesItsInput(Module):
    class Doubling(nn.Module):
        def forward(self, images):
            return images.mul_(2)

    def __init__(self):
        super().__init__()
        self.net.stem.insert(0, self.Doubling())


@pytest.mark.parametrize("kind", [Module, ChangesItsInput, ChannelsLast, Checkpointed, Manual])
def test_a_model_that_does_not_move_has_no_plasticity(kind):
    """So the reference was given what the training step gave, and nothing but the weights is left to differ."""

    class Still(kind):
        def __init__(self):
            super().__init__()
            self.lr = 0.0
            for part in (self.net.stem, self.net.middle, self.net.deep):
                for index, inner in enumerate(part):
                    if isinstance(inner, (nn.BatchNorm2d, nn.Dropout)):
                        part[index] = nn.Identity()

    class Sees(Watching):
        seen = ()

        def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
            self.seen = (*self.seen, *(plasticity or ()))

    callback = freezing(Sees(), reference_precision="float32")
    fit(new(Still), callback)
    seen = callback.active_policy.seen
    assert len(seen) >= 3 * 5
    assert max(seen) < 1e-12


def test_frozen_layers_are_in_evaluation_mode():
    seen = {}

    def look(trainer, pl_module):
        net = pl_module.net
        seen[trainer.global_step] = ([m.training for m in net.modules()], net.stem[1].running_mean.clone())

    fit(new(validated(Module)), freezing(ScriptedPolicy({4: 2})), After(look, 3, 5, 15), val=loader(8))
    assert all(seen[3][0])
    modes = dict(zip((path for path, _ in new().net.named_modules()), seen[15][0], strict=True))
    assert {path for path, training in modes.items() if not training} == {
        path for path in modes if path.startswith(("stem", "middle."))
    }
    assert torch.equal(seen[5][1], seen[15][1])


class Normalised(Module):
    """Has no dropout in front and no statistics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
            nn.Linear(8, 3),
        )


def test_freezing_does_not_touch_the_gradients_of_what_learns():
    def gradients(*callbacks):
        found = []

        class Look(L.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                if trainer.global_step == 4:
                    found.append([p.grad.clone() for p in pl_module.net[3:].parameters()])

        fit(new(Normalised), *callbacks, Look(), epochs=1)
        return found[0]

    frozen = freezing(ScriptedPolicy({4: 2}))
    assert all(map(torch.equal, gradients(), gradients(frozen)))
    assert frozen.frozen_depth == 2


class Towers(L.LightningModule):
    """The second was trained before and is tuned gently; the first is new."""

    def __init__(self):
        super().__init__()
        self.new = nn.Sequential(*(nn.Linear(8, 8) if place % 2 == 0 else nn.Tanh() for place in range(6)))
        self.tuned = nn.Sequential(*(nn.Linear(8, 8) if place % 2 == 0 else nn.Tanh() for place in range(6)))
        self.head = nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(torch.cat([self.new(x), self.tuned(x)], 1)), y)

    def configure_optimizers(self):
        fast, slow = [*self.new.parameters(), *self.head.parameters()], self.tuned.parameters()
        optimizer = torch.optim.AdamW([{"params": fast}, {"params": slow, "lr": 2e-6}], lr=6e-3)
        halved = lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        return [optimizer], [{"scheduler": halved, "interval": "step"}]


def test_a_second_tower_at_rest_does_not_freeze_the_first_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    data = DataLoader(TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=16)
    callback = freezing(FreezingPolicy())
    fit(new(Towers), callback, data=data, epochs=3)
    assert callback.layer_modules == ["new.0", "new.2", "new.4", "tuned.0", "tuned.2", "tuned.4"]
    assert max(callback.last_evaluation.plasticity[:3]) > 1e-4 > 1e-6 > max(callback.last_evaluation.plasticity[3:])
    assert callback.events == []


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_under_the_other_name_of_lightning(tmp_path):
    """Its Trainer never asks whether a callback is one of its own class; nor does the callback ask."""
    other = pytest.importorskip("pytorch_lightning", reason="a package of its own")
    if tuple(map(int, other.__version__.split(".")[:2])) < (2, 6):
        pytest.skip("before 2.6 it takes callbacks of its own class only")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = ConvNet()
            self.net.middle[3].p = 0.0  # dropout draws other numbers after a restart

        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers
        lr = 0.05

    def train(*callbacks, epochs, ckpt_path=None):
        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        checkpointing = any(isinstance(callback, other.callbacks.ModelCheckpoint) for callback in callbacks)
        trainer = other.Trainer(
            max_epochs=epochs, callbacks=list(callbacks), enable_checkpointing=checkpointing, **quiet
        )
        module = new(Other)
        L.seed_everything(3, verbose=False)
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return module

    callback = freezing(Watching())
    assert equal(train(epochs=2), train(callback, epochs=2))
    assert callback.savings().evaluations_done > 2
    saves, callback = other.callbacks.ModelCheckpoint(tmp_path, save_last=True), freezing(ScriptedPolicy({3: 2}))
    whole = train(freezing(ScriptedPolicy({3: 2})), epochs=4)
    train(freezing(ScriptedPolicy({3: 2})), saves, epochs=2)
    assert equal(whole, train(callback, epochs=4, ckpt_path=saves.last_model_path))
    assert [(event.step, event.depth) for event in callback.events] == [(3, 2)]
