"""Every ordinary way to train: with nothing frozen nothing changes, and frozen by the callback is frozen by hand."""

import copy
import functools
import itertools
import random
import threading
from collections.abc import Sequence

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.errors import LayerChainError, UnsupportedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:train_dataloader yielded None"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),  # pytest.warns emits Lightning's again
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    # torch's own, once in a process, where a checkpoint is read
    pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants"),
    # torch's own, where it compiles a module of which a part is compiled already
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Lightning's own, of an experimental signature
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
]


class Net(nn.Module):
    """Convolutions with batch normalisation and dropout in front, so that modes and random state matter."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.deep = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 2 * 2, 3)

    def forward(self, images):
        return self.head(self.deep(self.middle(self.stem(images))).flatten(1))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.lr = 0.05
        self.batch_size = 8
        self.resting = []  # what `ByHand` froze

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


class Watching(FreezingPolicy):
    """Has everything measured, at any learning rate, and decides nothing."""

    wants_reference = True

    def __init__(self):
        super().__init__()

    def observe(self, step, plasticity, learning_rate, loss):
        return None


def rest(part):
    """Freeze by hand: without gradients, statistics as they are, dropout as it is in training."""
    part.requires_grad_(False)
    for module in part.modules():
        module.training &= not any(buffer.is_floating_point() for buffer in module.buffers())


class ByHand(L.Callback):
    """What a careful user would write to freeze stem and middle after step 4."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= 4:
            pl_module.resting = [pl_module.net.stem, pl_module.net.middle]
            for part in pl_module.resting:
                rest(part)
                part.zero_grad(set_to_none=True)


class At(L.Callback):
    """Call `look(trainer, module)` after each optimizer step in `steps`."""

    def __init__(self, look, *steps):
        self.look, self.steps = look, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.steps or trainer.global_step in self.steps:
            self.look(trainer, pl_module)


def freezing(policy, **arguments):
    return KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, **{"workers": 0, **arguments})


def loader(samples=40, batch_size=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(samples) % 3), batch_size=batch_size)


def trainer_of(*callbacks, epochs=3, **arguments):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": epochs}
    return L.Trainer(callbacks=list(callbacks), **{**quiet, **arguments})


def fit(module, *callbacks, data=None, val=None, ckpt_path=None, **arguments):
    trainer = trainer_of(*callbacks, **arguments)
    L.seed_everything(3, verbose=False)
    trainer.fit(module, loader() if data is None else data, val, ckpt_path=ckpt_path)
    return trainer


def new(kind=Module, **arguments):
    torch.manual_seed(0)
    return kind(**arguments)


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def left_behind(module):
    return [path for path, part in module.named_modules() if vars(part).keys() & {"forward", "train"}] + [
        name for name, parameter in module.named_parameters() if not parameter.requires_grad
    ]


class Checkpointed(Module):
    """Recomputes its activations in the backward."""

    reentrant = False

    def training_step(self, batch, batch_idx):
        images, labels = batch
        hidden = images.requires_grad_() if self.reentrant else images
        for part in (self.net.stem, self.net.middle, self.net.deep):
            hidden = checkpoint(part, hidden, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.net.head(hidden.flatten(1)), labels)


class ChannelsLast(Module):
    def __init__(self):
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].to(memory_format=torch.channels_last), batch[1]), batch_idx)


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Groups(Module):
    def configure_optimizers(self):
        groups = [{"params": self.net.head.parameters(), "lr": 0.1}, {"params": self.net.stem.parameters()}]
        rest = [*self.net.middle.parameters(), *self.net.deep.parameters()]
        return torch.optim.AdamW([*groups, {"params": rest, "weight_decay": 0.0}], lr=0.01)


class Dictionary(Module):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "kept": batch[1]}


class Skipping(Module):
    """The first step of all among them, and one whose forward was done already."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class Trains(Module):
    def on_train_batch_start(self, batch, batch_idx):
        self.train()
        for part in self.resting:
            rest(part)


class LabelsItself(Module):
    """Switches modes inside the training step."""

    def training_step(self, batch, batch_idx):
        self.net.eval()
        with torch.no_grad():
            labels = self.net(batch[0]).argmax(1)
        self.net.train()
        for part in self.resting:
            rest(part)
        return super().training_step((batch[0], (labels + batch[1]) % 3), batch_idx)


class ThroughForward(Module):
    """The network is the LightningModule itself, which holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model():
            self.manual_backward(Module.training_step(self, batch, batch_idx) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class TwoBackwards(Manual):
    """The second loss sees less of the network than the first."""

    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(4 * 6 * 6, 3)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Module.training_step(self, batch, batch_idx))
        self.manual_backward(nn.functional.cross_entropy(self.aside(self.net.stem(batch[0]).flatten(1)), batch[1]))
        optimizer.step()


class ZeroGradients(Module):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Fused(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


class RandomInForward(Module):
    """Draws from every generator, in evaluation mode too."""

    class Net(Net):
        def forward(self, images):
            shift = torch.rand_like(images) + random.random() + float(np.random.rand())  # noqa: NPY002
            return super().forward(images + 0.1 * shift)

    def __init__(self):
        super().__init__()
        self.net = self.Net()


class Hooked(Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.net.stem.register_forward_hook(self.count)

    def count(self, module, arguments, output):
        self.calls += 1
        return 1.1 * output


class CompiledForward(Module):
    """Of one part only, as an attribute that hides the method."""

    def __init__(self):
        super().__init__()
        self.net.deep.forward = torch.compile(self.net.deep.forward, backend="aot_eager")


class Parametrized(Module):
    """Spectral normalisation goes on by one iteration with each forward in training mode."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net.stem[0])
        nn.utils.parametrizations.weight_norm(self.net.middle[0])


class Metrics(Module):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class TakesTheIterator(Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class EndsEarly(Module):
    """Leaves the rest of each epoch out, of the first one everything."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 or self.current_epoch == 0 else None


SETUPS = {
    "plain": (Module, {}),
    "gradient accumulation": (Module, {"accumulate_grad_batches": 2, "epochs": 5}),
    "gradient clipping by norm": (Module, {"gradient_clip_val": 0.1}),
    "gradient clipping by value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Module, {"precision": "bf16-mixed"}),
    "bf16-true": (Module, {"precision": "bf16-true"}),
    "64-true": (Module, {"precision": "64-true"}),
    "channels last": (ChannelsLast, {}),
    "activation checkpointing": (Checkpointed, {}),
    "manual optimization": (Manual, {}),
    "parameter groups": (Groups, {}),
    "a dictionary with the loss": (Dictionary, {}),
    "skipped steps": (Skipping, {"epochs": 4}),
    "self.train() in a hook": (Trains, {}),
    "self.net.train() in the step": (LabelsItself, {}),
    "self(batch) in the step": (ThroughForward, {}),
    "manual accumulation and clipping": (ManualAccumulation, {"epochs": 6}),
    "two backward passes": (TwoBackwards, {}),
    "gradients set to zero": (ZeroGradients, {}),
    "a fused optimizer": (Fused, {}),
    "random numbers in the forward": (RandomInForward, {}),
    "forward hooks of the user": (Hooked, {}),
    "a compiled forward": (CompiledForward, {}),
    "parametrizations": (Parametrized, {}),
    "metrics": (Metrics, {}),
    "dataloader_iter": (TakesTheIterator, {}),
    "epochs that end early": (EndsEarly, {"epochs": 6}),
    "a profiler": (Module, {"profiler": "simple"}),
    "data loaders made anew": (Module, {"reload_dataloaders_every_n_epochs": 1}),
    "overfit_batches": (Module, {"overfit_batches": 2, "epochs": 6}),
    "validation inside an epoch": (Module, {"val_check_interval": 2}),
    "detect_anomaly": (Module, {"detect_anomaly": True}),
}


def validated(kind):
    """Switches modes in the middle of an epoch, as any validation does."""

    class WithValidation(kind):
        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    return WithValidation


def trained(setup, *callbacks):
    kind, arguments = SETUPS[setup]
    val = loader(8) if "val_check_interval" in arguments else None
    module = new(validated(kind) if val else kind)
    fit(module, *callbacks, val=val, **arguments)
    return module


trained_plainly = functools.cache(trained)


@pytest.mark.parametrize("setup", SETUPS)
def test_with_nothing_frozen_training_is_the_same_bit_for_bit(setup):
    callback = freezing(Watching())
    plain, watched = trained_plainly(setup), trained(setup, callback)
    assert callback.savings().evaluations_done >= 2  # else this would show nothing
    assert equal(plain, watched)
    assert left_behind(watched) == left_behind(plain)


@pytest.mark.parametrize("setup", SETUPS)
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


COMPILED = []


def counting_backend(graph, example_inputs):
    """A function of this module, or the reference would have a copy that counts for itself."""
    from torch._dynamo.backends.debugging import aot_eager  # slow, and changes what the callback does

    COMPILED.append(len(example_inputs))
    return aot_eager(graph, example_inputs)


@pytest.mark.parametrize("way", ["the LightningModule", "the network", "the network in place", "the training step"])
class TestCompiled:
    """`torch.compile`, with a backend that counts how often it is asked."""

    def compiled(self, way):
        torch.compiler.reset()
        COMPILED.clear()
        module, backend = new(), counting_backend
        if way == "the LightningModule":
            return torch.compile(module, backend=backend), module
        if way == "the network":
            module.net = torch.compile(module.net, backend=backend)
        elif way == "the network in place":
            module.net.compile(backend=backend)
        else:
            module.training_step = torch.compile(module.training_step, backend=backend)
        return module, module

    def test_evaluations_do_not_change_training_nor_compile_anew(self, way):
        counts, states = [], []
        for callbacks in ([], [freezing(Watching())]):
            module, inner = self.compiled(way)
            fit(module, *callbacks, epochs=6)
            states.append(inner)
            counts.append(len(COMPILED))
        assert callbacks[0].savings().evaluations_done > 5
        assert 0 < counts[1] <= counts[0]
        assert equal(*states)

    def test_freezing_stops_and_unfreezing_starts_learning(self, way):
        module, _ = self.compiled(way)
        seen = {}

        def look(trainer, pl_module):
            weight = next(iter(dict(pl_module.net.named_parameters()).values()))
            seen[trainer.global_step] = (weight.detach().clone(), weight.grad is None)

        callback = freezing(ScriptedPolicy({4: 2, 8: 0}))
        fit(module, callback, At(look, 3, 4, 5, 7, 8, 9))
        assert len(callback.layer_modules) == 3
        assert not torch.equal(seen[3][0], seen[4][0])
        assert torch.equal(seen[4][0], seen[7][0])
        assert seen[5][1]
        assert torch.equal(seen[7][0], seen[8][0])
        assert not torch.equal(seen[8][0], seen[9][0])


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


@pytest.mark.parametrize("order", [1, -1])
def test_copies_that_other_callbacks_make_are_ordinary_modules(order, tmp_path):
    copies = []

    def look(trainer, pl_module):
        torch.save(pl_module.net, tmp_path / "net.pt")
        copies.extend([copy.deepcopy(pl_module.net), torch.load(tmp_path / "net.pt", weights_only=False)])

    callback = freezing(Watching())
    fit(new(), *[At(look, 2, 3, 4), callback][::order])
    assert callback.savings().evaluations_done > 2
    assert not any(left_behind(net) for net in copies)
    fit(new(), *[At(look, 6), freezing(ScriptedPolicy({4: 2}))][::order])
    assert not copies[-1].stem[1].training
    for net in copies:
        assert all(part.training for part in net.train().modules())


def test_manual_optimization_past_lightning_is_told():
    class Past(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            Module.training_step(self, batch, batch_idx).backward()
            optimizer.step()

    plain, watched = new(Past), new(Past)
    fit(plain)
    with pytest.warns(UserWarning, match=r"call self\.manual_backward\(loss\) instead") as told:
        fit(watched, freezing(Watching()))
    assert len([w for w in told if "manual_backward" in str(w.message)]) == 1
    assert equal(plain, watched)


class Adversaries(L.LightningModule):
    """A generator and a discriminator with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        self.discriminator = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self.generator(batch[0].flatten(1)[:, :6])
        first.zero_grad()
        self.manual_backward(-self.discriminator(made).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.discriminator(made.detach()).mean())
        second.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.generator, self.discriminator)]


def test_a_prefix_ends_where_another_optimizer_begins():
    plain, watched, frozen = new(Adversaries), new(Adversaries), new(Adversaries)
    fit(plain)
    callback = freezing(Watching())
    with pytest.warns(UserWarning, match=r"'discriminator\.0' belongs to another optimizer.*at most 3 of 5"):
        fit(watched, callback)
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)
    weights = []
    with pytest.warns(UserWarning, match="belongs to another optimizer"):
        fit(
            frozen,
            freezing(ScriptedPolicy({4: 2})),
            At(lambda _, m: weights.append([m.generator[i].weight.detach().clone() for i in (0, 2)]), 4, 10),
        )
    assert torch.equal(weights[0][0], weights[-1][0])
    assert not torch.equal(weights[0][1], weights[-1][1])


class Toggling(Adversaries):
    """While one of the two learns, the parameters of the other have no gradients."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with first.toggle_model():
            made = self.generator(batch[0].flatten(1)[:, :6])
            first.zero_grad()
            self.manual_backward(-self.discriminator(made).mean())
            first.step()
        with second.toggle_model():
            second.zero_grad()
            self.manual_backward(self.discriminator(made.detach()).mean())
            second.step()


def test_toggled_optimizers():
    plain, watched, callback = new(Toggling), new(Toggling), freezing(Watching())
    fit(plain)
    fit(watched, callback)
    assert callback.savings().evaluations_done > 2
    assert callback.layer_modules == ["generator.0", "generator.1"]
    assert equal(plain, watched)
    states, frozen = [], new(Toggling)
    fit(frozen, freezing(ScriptedPolicy({4: 1})), At(lambda _, m: states.append(copy.deepcopy(m.state_dict())), 4, 30))
    still = {name for name, value in states[0].items() if torch.equal(value, states[-1][name])}
    assert still == {"generator.0.weight", "generator.0.bias"}
    assert left_behind(frozen) == []


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "AdamW": {"amsgrad": True, "foreach": True},
    **{
        name: {} for name in ("Adam", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Adafactor")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_leave_alone_what_is_frozen(name):
    class Optimized(Module):
        def configure_optimizers(self):
            return getattr(torch.optim, name)(self.parameters(), lr=0.01, weight_decay=0.1, **OPTIMIZERS[name])

    states = []
    look = At(lambda _, module: states.append(copy.deepcopy(module.net.state_dict())), 4, 15)
    fit(new(Optimized), freezing(ScriptedPolicy({4: 2})), look)
    moved = {name.split(".")[0] for name, value in states[0].items() if not torch.equal(value, states[1][name])}
    assert moved == {"deep", "head"}


@pytest.mark.parametrize("defaults", [{"lr": None}, {"lr": "auto"}, {}])
def test_optimizers_without_a_learning_rate(defaults):
    class FindsItsOwn(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, defaults)

        @torch.no_grad()
        def step(self, closure):
            loss = torch.enable_grad()(closure)()
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
            return loss

    class Optimized(Module):
        def configure_optimizers(self):
            return FindsItsOwn(self.parameters())

    callback = freezing(FreezingPolicy(pretrained=True, peer_tolerance=0.99))
    fit(new(Optimized), callback)
    assert [event.kind for event in callback.events] == ["freeze"]


def test_lbfgs_is_refused_because_it_does_not():
    class Optimized(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UnsupportedError, match="goes on moving frozen weights"):
        fit(new(Optimized), freezing(Watching()))


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


class Filtering(Module):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
@pytest.mark.parametrize("kind", [Module, Filtering])
@pytest.mark.parametrize("script", [{3: 2}, {12: 2}])
def test_model_checkpoint_and_resume_from_before_and_after_a_freeze(tmp_path, kind, script):
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
def test_a_checkpoint_of_a_run_with_the_callback_serves_one_without_and_the_other_way_round(tmp_path):
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
    look = At(lambda _, m: moved.append(m.net.stem[0].weight.detach().clone()), 16, 25)
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


def test_a_checkpoint_that_is_only_validated_or_tested_changes_nothing(tmp_path):
    class Steps(Module):
        def validation_step(self, batch, batch_idx):
            return self.net(batch[0]).mean()

        test_step = predict_step = validation_step

    callback, module = freezing(ScriptedPolicy({3: 2, 8: 1})), new(Steps)
    path = tmp_path / "early.ckpt"
    trainer = fit(module, callback, At(lambda trainer, _: trainer.save_checkpoint(path), 6), val=loader(8))
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


def test_a_fit_that_failed_before_it_began_leaves_nothing_to_the_next(tmp_path):
    class Fails(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            raise RuntimeError("not today")

    path, script = tmp_path / "frozen.ckpt", ScriptedPolicy({3: 2})
    fit(new(), freezing(script), At(lambda trainer, _: trainer.save_checkpoint(path), 6))
    callback = freezing(script)
    with pytest.raises(RuntimeError, match="not today"):
        fit(new(), callback, Fails(), ckpt_path=path)
    seen = []
    fit(new(), callback, At(lambda *_: seen.append(callback.frozen_depth), 1))
    assert seen == [0]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("finder", ["LearningRateFinder", "BatchSizeFinder"])
def test_inert_while_callbacks_of_lightning_try_and_at_work_afterwards(finder, order):
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
    look = At(lambda trainer, _: seen.update({trainer.global_step: callback._engine.prefix.depth}))
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


def test_parameters_that_the_user_froze_stay_frozen():
    module = new()
    module.net.stem[0].bias.requires_grad_(False)
    fit(module, freezing(ScriptedPolicy({3: 2, 6: 0})))
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["net.stem.0.bias"]


def test_tied_weights_and_modules_called_twice_freeze_together_or_not_at_all():
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
    assert ["freeze together" in text for text in told] == [False, True]
    assert "so nothing from there on can freeze" in told[0]
    assert callback._chain.max_depth == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_that_is_called_twice_freezes_as_one_with_all_that_lies_between(precision):
    class Twice(Module):
        def __init__(self):
            super().__init__()
            linears = [nn.Linear(6, 6) for _ in range(6)]
            self.net = nn.Sequential(*linears[:3], linears[1], *linears[3:])

        def training_step(self, batch, batch_idx):
            return self.net(batch[0].flatten(1)[:, :6]).square().mean()

    seen, callback = [], freezing(ScriptedPolicy({4: 2}))
    look = At(lambda _, m: seen.append([n for n, p in m.net.named_parameters() if p.requires_grad]), 5)
    with pytest.warns(UserWarning, match=r"'net\.1' to 'net\.4' share 'net\.1\.weight' and 1 more and freeze together"):
        fit(new(Twice), callback, look, precision=precision)
    assert seen == [["5.weight", "5.bias", "6.weight", "6.bias"]]


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

        def observe(self, step, plasticity, learning_rate, loss):
            self.seen = (*self.seen, *(plasticity or ()))

    callback = freezing(Sees(), reference_precision="float32")
    fit(new(Still), callback)
    seen = callback._engine.policy.seen
    assert len(seen) >= 3 * 5
    assert max(seen) < 1e-12


def test_statistics_in_the_frozen_prefix_are_at_rest_and_dropout_is_not():
    seen = {}

    def look(trainer, pl_module):
        net = pl_module.net
        seen[trainer.global_step] = ([m.training for m in net.modules()], net.stem[1].running_mean.clone())

    fit(new(validated(Module)), freezing(ScriptedPolicy({4: 2})), At(look, 3, 5, 15), val=loader(8))
    assert all(seen[3][0])
    modes = dict(zip((path for path, _ in new().net.named_modules()), seen[15][0], strict=True))
    leaves = ("0", "1", "2", "3")
    assert {path for path, training in modes.items() if not training and path[-1] in leaves} == {"stem.1", "middle.1"}
    assert torch.equal(seen[5][1], seen[15][1])


class Normalised(Module):
    """Has dropout in front and no statistics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(0.5)),
            nn.TransformerEncoderLayer(8, 2, 8, 0.5, batch_first=True),
            nn.Linear(8, 8),
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


class Endless(IterableDataset):
    def __init__(self, batches=None):
        self.batches = batches

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for place in itertools.count() if self.batches is None else range(self.batches):
            yield torch.randn(1, 8, 8, generator=generator), place % 3


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (Endless(40), {"max_epochs": 3}),
        (Endless(40), {"max_epochs": -1, "max_steps": 15}),
        (Endless(), {"max_epochs": 1, "limit_train_batches": 15}),
        (Endless(), {"max_epochs": -1, "max_steps": 15}),
    ],
)
def test_iterable_datasets(dataset, arguments):
    module, callback = new(), KnowledgeGuidedFreezing(ScriptedPolicy({3: 1}), workers=0)
    fit(module, callback, data=DataLoader(dataset, batch_size=8), **arguments)
    assert callback.frozen_depth == 1


def test_data_that_the_module_makes_when_fitting_starts():
    class MakesData(Module):
        def on_fit_start(self):
            self.data = loader()

        def train_dataloader(self):
            return self.data

    callback = KnowledgeGuidedFreezing(Watching(), workers=0)
    trainer_of(callback, epochs=4).fit(new(MakesData))
    assert callback.savings().evaluations_done == 2  # 20 steps, 8 from one to the next


def test_batches_of_any_kind():
    class Batches(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["pair"][0], batch["pair"][1]), batch_idx)

    def collate(samples):
        images, labels = zip(*samples, strict=True)
        return {"pair": (torch.stack(images), torch.tensor(labels)), "names": ["a"] * len(images), "nothing": None}

    data = DataLoader(Endless(40), batch_size=8, collate_fn=collate)
    callback = freezing(Watching())
    fit(new(Batches), callback, data=data)
    assert callback.savings().evaluations_done > 2


class Pair(Sequence):
    """Is not made from a list of what it holds."""

    def __init__(self, first, second):
        self.parts = [first, second]

    def __getitem__(self, index):
        return self.parts[index]

    def __len__(self):
        return 2


class Takes(Module):
    """Its network is given what ``make`` makes of the images."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.net.forward = lambda given: Net.forward(self.net, given[0])

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(self.make(batch[0])), batch[1])


@pytest.mark.parametrize("make", [lambda images: (images, range(2)), lambda images: [images, {"a": Pair("b", 1)}]])
def test_arguments_that_cannot_be_made_anew_from_their_parts(make):
    plain, watched, callback = new(Takes, make=make), new(Takes, make=make), freezing(Watching())
    fit(plain)
    fit(watched, callback)
    assert callback.savings().evaluations_done >= 2
    assert equal(plain, watched)


def test_images_in_what_cannot_be_made_anew_are_told_of_and_training_goes_on():
    def make(images):
        return Pair(images, 1)

    plain, watched, callback = new(Takes, make=make), new(Takes, make=make), freezing(Watching())
    fit(plain)
    with (
        pytest.warns(UserWarning, match="the reference model failed 3 times in a row"),
        pytest.warns(UserWarning, match=r"the reference model failed: TypeError: .*'second'\. Training goes on"),
    ):
        fit(watched, callback)
    assert equal(plain, watched)
    assert left_behind(watched) == left_behind(plain)


def test_batches_that_are_nothing():
    class Counting(Watching):
        steps = ()

        def observe(self, step, plasticity, learning_rate, loss):
            self.steps = (*self.steps, step)

    def collate(samples):
        return None if samples[0][1] == 1 else torch.utils.data.default_collate(samples)

    plain, watched, callback = new(), new(), freezing(Counting())
    for module, callbacks in ((plain, []), (watched, [callback])):
        fit(module, *callbacks, data=DataLoader(loader().dataset, batch_size=8, collate_fn=collate), epochs=4)
    assert callback._engine.policy.steps == tuple(range(1, 17))
    assert callback.savings().evaluations_done > 2
    assert equal(plain, watched)


SCHEDULES = {
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), False),
    "linear": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.01, 30), False),
    "one-cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=31), False),
    "step decay": (lambda o: lr_scheduler.StepLR(o, 20, gamma=0.1), True),
    "warm restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20), True),
    "none": (lambda o: lr_scheduler.ConstantLR(o, 1.0), False),
}


class Eager(FreezingPolicy):
    """Freezes the first layer module at step 13, and lets go again by its own rule."""

    def observe(self, step, plasticity, learning_rate, loss):
        decision = super().observe(step, None, learning_rate, None)
        if step == 13:
            self.depth, self._lr_at_freeze = 1, learning_rate
            return type(decision or self._early)(1, "early")
        return decision

    @property
    def _early(self):
        from lightning_egeria.freezing.policy import Decision

        return Decision(1, "early")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_smooth_schedules_keep_what_is_frozen_and_jumps_let_it_go(schedule):
    make, unfreezes = SCHEDULES[schedule]

    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": make(optimizer), "interval": "step"}]

    callback = freezing(Eager(tolerance=1e-12))
    fit(new(Scheduled), callback, epochs=6)
    assert [event.kind for event in callback.events] == (["freeze", "unfreeze"] if unfreezes else ["freeze"])


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


def test_reduce_on_plateau():
    class Plateau(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", torch.tensor(1.0))  # never gets better
            return loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=3)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    callback = freezing(Eager(tolerance=1e-12))
    fit(new(Plateau), callback, epochs=6)
    assert [event.kind for event in callback.events] == ["freeze", "unfreeze"]


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided")
def test_under_the_other_name_of_lightning(tmp_path):
    """Its Trainer never asks whether a callback is one of its own class; nor does the callback ask."""
    other = pytest.importorskip("pytorch_lightning")
    if tuple(map(int, other.__version__.split(".")[:2])) < (2, 6):
        pytest.skip("before 2.6 it takes callbacks of its own class only")

    class Other(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()
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


def test_code_that_switches_requires_grad_itself_is_left_alone_and_told():
    class Toggles(Module):
        def on_train_batch_start(self, batch, batch_idx):
            self.net.requires_grad_(True)

    callback, module = freezing(ScriptedPolicy({3: 2, 8: 1})), new(Toggles)
    with pytest.warns(UserWarning, match=r"'net\.stem\.\S+' was given a gradient.*nothing will freeze") as told:
        fit(module, callback)
    assert len([w for w in told if "was given a gradient" in str(w.message)]) == 1
    assert [(event.step, event.depth) for event in callback.events] == [(3, 2), (4, 0)]
    assert left_behind(module) == []


def test_a_backbone_that_is_released_later_is_found_then():
    class Releases(pl_callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze([pl_module.net.stem, pl_module.net.middle], train_bn=False)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 2:
                self.unfreeze_and_add_param_group([pl_module.net.stem, pl_module.net.middle], optimizer, train_bn=False)

    class More(Filtering):
        def __init__(self):
            super().__init__()
            net = self.net
            net.deep = nn.Sequential(net.deep, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))

    callback, module = freezing(ScriptedPolicy({4: 1, 14: 1})), new(More)
    found = {}
    with pytest.warns(UserWarning, match=r"have begun to learn since the layer modules were found"):
        fit(
            module,
            callback,
            Releases(),
            At(lambda *_: found.update({_[0].global_step: callback.layer_modules[0]}), 5, 15),
            epochs=4,
        )
    assert found == {5: "net.deep.0.0", 15: "net.stem.0"}
    assert [(event.step, event.depth) for event in callback.events] == [(4, 1), (10, 0), (11, 1)]


class BackboneAndHead(Module):
    def __init__(self):
        super().__init__()
        del self.net
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("names", [None, ["backbone.1", "backbone.3", "backbone.4"]])
def test_a_head_of_one_layer_waits_for_its_backbone(names):
    callback = freezing(ScriptedPolicy({8: 1}), layer_modules=names)
    found, moved = {}, []

    def look(trainer, module):
        found[trainer.global_step] = callback.layer_modules
        moved.append(module.backbone[1].weight.detach().clone())

    finetuning = pl_callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    with pytest.warns(UserWarning, match=r"freezing: .*'backbone\.1\.weight' and \d+ more .* do not learn yet") as told:
        fit(new(BackboneAndHead), finetuning, callback, At(look, 5, 7, 8, 15))
    assert len([w for w in told if "freezing: " in str(w.message)]) == 1
    assert found[5] == []
    assert found[7] == found[8] == found[15] == ["backbone.1", "backbone.3", "backbone.4"]
    assert [(event.step, event.depth) for event in callback.events] == [(8, 1)]
    assert [torch.equal(a, b) for a, b in itertools.pairwise(moved)] == [False, False, True]


def test_what_never_freezes_may_begin_to_learn_later():
    class LongHead(BackboneAndHead):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    class Allowed(Watching):
        def start(self, max_depth):
            allowed.append(max_depth)

    callback, allowed = freezing(Allowed(), never_freeze=["backbone.4"]), []

    finetuning = pl_callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1)
    with pytest.warns(UserWarning, match="have begun to learn since"):
        fit(new(LongHead), finetuning, callback)
    assert allowed == [1, 2]
    assert callback.layer_modules[:3] == ["backbone.1", "backbone.3", "backbone.4"]


def test_a_backbone_that_runs_without_gradients_in_the_first_epochs():
    class Late(BackboneAndHead):
        def training_step(self, batch, batch_idx):
            with torch.set_grad_enabled(self.current_epoch >= 2):
                features = self.backbone(batch[0])
            return nn.functional.cross_entropy(self.head(features), batch[1])

    callback = freezing(Watching())
    with pytest.warns(UserWarning, match="do not learn yet") as told:
        fit(new(Late), callback)
    assert len([w for w in told if "freezing: " in str(w.message)]) == 1
    assert callback.layer_modules == ["backbone.1", "backbone.3", "backbone.4"]


def test_a_head_of_one_layer_alone_trains_to_the_end():
    class Alone(BackboneAndHead):
        def __init__(self):
            super().__init__()
            self.backbone.requires_grad_(False)

    callback = freezing(Watching())
    with pytest.warns(UserWarning, match="do not learn yet"):
        fit(new(Alone), callback)
    assert (callback.events, callback.layer_modules) == ([], [])
