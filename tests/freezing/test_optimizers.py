"""Optimizers of every kind leave frozen weights alone."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria import FreezingPolicy, ScriptedPolicy
from lightning_egeria.errors import UnsupportedError
from support.freezing.setups import Manual, Module, Watching, freezing, new
from support.models import After, equal, fit, left_behind


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
            After(lambda _, m: weights.append([m.generator[i].weight.detach().clone() for i in (0, 2)]), 4, 10),
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
    fit(
        frozen,
        freezing(ScriptedPolicy({4: 1})),
        After(lambda _, m: states.append(copy.deepcopy(m.state_dict())), 4, 30),
    )
    still = {name for name, value in states[0].items() if torch.equal(value, states[-1][name])}
    assert still == {"generator.0.weight", "generator.0.bias"}
    assert left_behind(frozen) == []


class DiscriminatorFirst(Adversaries):
    """The first backward pass does not reach the generator."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        made = self.generator(batch[0].flatten(1)[:, :6])
        second.zero_grad()
        self.manual_backward(self.discriminator(made.detach()).mean())
        second.step()
        first.zero_grad()
        self.manual_backward(-self.discriminator(made).mean())
        first.step()


class DiscriminatorToggledFirst(Adversaries):
    """As before, and the parameters of the generator have no gradients meanwhile."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with second.toggle_model():
            made = self.generator(batch[0].flatten(1)[:, :6])
            second.zero_grad()
            self.manual_backward(self.discriminator(made).mean())
            second.step()
        with first.toggle_model():
            first.zero_grad()
            self.manual_backward(-self.discriminator(self.generator(batch[0].flatten(1)[:, :6])).mean())
            first.step()


@pytest.mark.parametrize("kind", [DiscriminatorFirst, DiscriminatorToggledFirst])
def test_one_of_several_networks_is_not_chosen_silently(kind):
    plain, watched, callback = new(kind), new(kind), freezing(ScriptedPolicy({2: 1}))
    fit(plain)
    with pytest.warns(UserWarning, match="trains several networks") as told:
        fit(watched, callback)
    (text,) = [str(one.message) for one in told if "several networks" in str(one.message)]
    assert text == (
        f"freezing: {kind.__name__} trains several networks, with an optimizer each. The first backward pass reaches "
        "'discriminator.0', but not 'generator.0'. Name the layer modules of one network with layer_modules=[...]. "
        "Training continues as without the callback"
    )
    assert callback.events == []
    assert equal(plain, watched)


@pytest.mark.parametrize(
    "arguments", [{"layer_modules": ["discriminator.0", "discriminator.1"]}, {"freeze_until": "discriminator.0"}]
)
def test_one_of_several_networks_can_be_named(arguments):
    module, callback = new(DiscriminatorFirst), freezing(ScriptedPolicy({4: 1}), **arguments)
    fit(module, callback)
    assert callback.layer_modules == ["discriminator.0", "discriminator.1"]
    assert callback.frozen_depth == 1


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
    look = After(lambda _, module: states.append(copy.deepcopy(module.net.state_dict())), 4, 15)
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

    callback = freezing(FreezingPolicy(pretrained=True, trial=False, peer_tolerance=0.99))
    fit(new(Optimized), callback)
    assert [event.kind for event in callback.events] == ["freeze"]


def test_lbfgs_is_refused_because_it_does_not():
    class Optimized(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UnsupportedError, match="keeps moving frozen weights"):
        fit(new(Optimized), freezing(Watching()))
