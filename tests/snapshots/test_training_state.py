"""Captured, left, restored: what runs from there is bit for bit the same each time."""

import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from timm.optim import Lookahead
from torch import nn
from torch.utils.data import Subset

from lightning_egeria.core.snapshots.tensor_store import TensorStore
from lightning_egeria.core.snapshots.training_state import TrainingState
from support.models import After, Classifier, ConvNet, Transformer, equal, fit, images, loader, tokens


class Slow(torch.optim.SGD):
    """Steps are averaged now and then with weights, and counted, in attributes of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.count, self.slow = 0, None

    def step(self, closure=None):
        loss = super().step(closure)
        self.count += 1
        weights = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.slow is None:
            self.slow = [weight.detach().clone() for weight in weights]
        if self.count % 3 == 0:
            for kept, weight in zip(self.slow, weights, strict=True):
                weight.data.copy_(kept.lerp_(weight.detach(), 0.5))
        return loss


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "adam with a tensor as rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),  # has state before its first step
    "around another": lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.05, momentum=0.9), k=3),
    "with attributes": Slow,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),  # has lists of tensors
}
SCHEDULERS = {
    "none": None,
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=40, cycle_momentum=bool({"momentum", "betas"} & optimizer.defaults.keys())
    ),
    "chained": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
}


class Run:
    """Training by hand: `step` takes the batches in order, from where `position` stands."""

    def __init__(self, net=None, optimizer="sgd", scheduler="none", data=None, scaler=None):
        torch.manual_seed(0)
        self.net = ConvNet() if net is None else net
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        make = SCHEDULERS[scheduler]
        self.scheduler = make(self.optimizer) if make is not None else None
        self.scaler = scaler
        self.batches = list(loader(images() if data is None else data))

    def steps(self, count, first=0):
        """Return the losses and the rates."""
        return [self.step(number) for number in range(first, first + count)]

    def step(self, number):
        inputs, labels = self.batches[number % len(self.batches)]

        def closure():
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(inputs), labels)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return loss

        if self.scaler is None:
            loss = self.optimizer.step(closure)
        else:
            loss = closure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.item(), float(self.optimizer.param_groups[0]["lr"])

    def capture(self, store=None):
        others = [other for other in (self.scheduler, self.scaler) if other is not None]
        return TrainingState(self.net, [self.optimizer], others, store)

    def everything(self):
        """Whatever the next step depends on, in a form that can be compared."""
        return (
            {name: value.clone() for name, value in self.net.state_dict().items()},
            copy.deepcopy(self.optimizer.state_dict()),
            None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            torch.get_rng_state(),
        )


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, of a chained schedule
def test_the_same_branch_twice_with_another_between(optimizer, scheduler, before):
    run = Run(optimizer=optimizer, scheduler=scheduler)
    run.steps(before)
    state = run.capture()
    first = run.steps(6, before)
    ended = run.everything()
    state.restore()
    for group in run.optimizer.param_groups:
        group["lr"] = group["lr"] * 3  # another branch
    other = run.steps(4, before + 20)
    state.restore()
    assert run.steps(6, before) == first
    assert first[: len(other)] != other
    assert same(run.everything(), ended)


@pytest.mark.parametrize("most_bytes", [0, 2**20])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_in_a_store_return_bit_for_bit(optimizer, most_bytes):
    """Two branches and their parent, in memory or in files."""
    store = TensorStore(most_bytes)
    run = Run(optimizer=optimizer)
    run.steps(2)
    parent = run.capture(store)
    run.steps(2, 2)
    branch = run.capture(store)
    first = run.steps(2, 4)
    parent.restore()
    other = run.capture(store)
    second = run.steps(4, 2)
    assert second[2:] == first
    for state, again in ((branch, first), (other, second), (parent, second)):
        state.restore()
        assert run.steps(len(again), 6 - len(again)) == again
    assert (store.file_bytes > 0) == (most_bytes == 0)


def test_states_share_what_did_not_change():
    store = TensorStore(2**30)
    run = Run()
    run.steps(1)
    states = [run.capture(store)]
    alone = store.memory_bytes
    for parameter in run.net.stem.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    run.steps(1, 1)
    states.append(run.capture(store))
    frozen = sum(parameter.nbytes for parameter in run.net.stem.parameters())
    assert store.memory_bytes <= 2 * alone - 2 * frozen  # weights and momentum; the second has no gradients of them
    states.append(run.capture(store))
    assert store.memory_bytes <= 2 * alone - 2 * frozen


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_transformers_with_dropout(optimizer):
    run = Run(Transformer(), optimizer, data=tokens())
    run.steps(2)
    state = run.capture()
    first = run.steps(5, 2)
    state.restore()
    assert run.steps(5, 2) == first


def test_a_run_that_was_watched_is_the_run():
    plain, watched = Run(), Run()
    torch.manual_seed(0)
    losses = plain.steps(8)
    torch.manual_seed(0)
    found = watched.steps(4)
    state = watched.capture()
    watched.steps(3, 4)
    state.restore()
    assert found + watched.steps(4, 4) == losses
    assert equal(plain.net, watched.net)


def test_a_winner_goes_on_from_its_own_state():
    """Two branches from one state; the first wins, and returns after the second has run."""
    run, alone = Run(), Run()
    torch.manual_seed(0)
    expected = alone.steps(9)
    torch.manual_seed(0)
    run.steps(3)
    start = run.capture()
    run.steps(3, 3)
    winner = run.capture()
    start.restore()
    run.steps(3, 10)
    winner.restore()
    assert run.steps(3, 6) == expected[6:]


def test_a_gradient_scaler_returns():
    run = Run(scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    run.steps(1)
    state = run.capture()
    first, scale = run.steps(4, 1), run.scaler.get_scale()
    state.restore()
    assert run.scaler.get_scale() == 8.0 != scale
    assert run.steps(4, 1) == first
    assert run.scaler.get_scale() == scale


def test_a_window_of_accumulation_goes_on():
    """Gradients count: they are part of the next step, and one that is absent is not one of zeros."""
    run = Run()
    inputs, labels = run.batches[0]
    nn.functional.cross_entropy(run.net(inputs), labels).backward()
    run.net.head.bias.grad = None
    state = run.capture()
    expected = {name: parameter.grad for name, parameter in run.net.named_parameters()}
    kept = {name: None if grad is None else grad.clone() for name, grad in expected.items()}
    run.steps(2)
    state.restore()
    for name, parameter in run.net.named_parameters():
        assert parameter.grad is expected[name]
        assert kept[name] is None or torch.equal(parameter.grad, kept[name])


def test_tensors_keep_their_identity():
    run = Run()
    before = [*run.net.parameters(), *run.net.buffers()]
    state = run.capture()
    run.steps(2)
    state.restore()
    assert all(one is other for one, other in zip(before, [*run.net.parameters(), *run.net.buffers()], strict=True))


class Buffers(nn.Module):
    """Replaces, adds and removes buffers, as modules do that cache something."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.register_buffer("gone", torch.ones(1))
        self.register_buffer("later", None)
        self.register_buffer("expanded", torch.arange(3.0).expand(2, 3))
        self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).T)

    def change(self):
        self.mean = self.mean + 1
        self.later = torch.ones(4)
        self.strided += 1
        self.expanded[:1] += 1
        del self.gone
        self.register_buffer("new", torch.zeros(1))


def test_buffers_of_all_kinds_return():
    net = Buffers()
    before = {name: None if buffer is None else buffer.clone() for name, buffer in net._buffers.items()}
    state = TrainingState(net)
    for _ in range(2):
        net.change()
        state.restore()
        assert list(net._buffers) == list(before)
        assert net.later is None
        assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    state, before = TrainingState(net), net[0].weight.detach().clone()
    with torch.no_grad():
        net[0].weight += 1
    state.restore()
    assert net[1].weight is net[0].weight
    assert torch.equal(net[1].weight, before)


def test_optimizer_state_keeps_its_dtype():
    """`load_state_dict` would cast it to the dtype of the parameter."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["mean"] = torch.tensor([1 / 3, 1e-9])
    state = TrainingState(nn.ParameterList([weight]), [optimizer])
    optimizer.state[weight]["mean"].zero_()
    state.restore()
    assert torch.equal(optimizer.state[weight]["mean"], torch.tensor([1 / 3, 1e-9]))


def test_groups_that_were_added_or_changed_return():
    run = Run()
    group = run.optimizer.param_groups[0]
    state = run.capture()
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 3.0})
    removed = group["params"].pop()
    group.update(lr=7.0, extra=True)
    state.restore()
    assert len(run.optimizer.param_groups) == 1
    assert run.optimizer.param_groups[0] is group  # schedulers refer to it
    assert group["params"][-1] is removed
    assert group["lr"] == 0.05
    assert "extra" not in group


def test_a_rate_that_changes_in_place_returns_each_time():
    run = Run(optimizer="adam with a tensor as rate")
    state = run.capture()
    for _ in range(2):
        run.optimizer.param_groups[0]["lr"].mul_(3)
        state.restore()
        assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(0.01)


class Live:
    """Gives and takes the state that it goes on changing."""

    def __init__(self):
        self.seen = [1]

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_others_return_each_time_whatever_they_share():
    other = Live()
    state = TrainingState(nn.Linear(1, 1), others=[other])
    for _ in range(2):
        other.seen.append(2)
        state.restore()
        assert other.seen == [1]


def test_all_generators_return():
    state = TrainingState(nn.Linear(1, 1))
    drawn = [(torch.rand(1).item(), np.random.rand(), random.random()) for _ in range(3)]
    state.restore()
    assert [(torch.rand(1).item(), np.random.rand(), random.random()) for _ in range(3)] == drawn


@pytest.mark.parametrize("change", ["replaced", "added", "removed", "module", "other module", "no module"])
def test_parameters_and_submodules_return(change):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Dropout(0.5))
    tree, values = dict(net.named_modules()), {name: one.clone() for name, one in net.named_parameters()}
    parameters = dict(net.named_parameters())
    state = TrainingState(net)
    if change == "replaced":
        net[1].weight = nn.Parameter(torch.ones(2, 2))
    elif change == "added":
        net[1].register_parameter("scale", nn.Parameter(torch.ones(1)))
    elif change == "removed":
        net[1].register_parameter("weight", None)
    elif change == "module":
        net.append(nn.Linear(2, 2))
    elif change == "other module":
        net[2] = nn.Dropout(0.1)
    else:
        del net[1]
    with torch.no_grad():
        net[0].weight.fill_(5.0)
    state.restore()
    assert list(net.named_modules()) == list(tree.items())
    assert all(now is parameters[name] and torch.equal(now, values[name]) for name, now in net.named_parameters())
    assert dict(net.named_parameters()).keys() == parameters.keys()


def test_requires_grad_is_left_alone():
    net = nn.Linear(2, 2)
    state = TrainingState(net)
    net.weight.requires_grad_(False)
    state.restore()
    assert not net.weight.requires_grad
    assert net.bias.requires_grad


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_inside_one_fit(optimizer):
    """With the same batch over and over, the steps behind the second restoring repeat those behind the capture."""

    class Cycled(Classifier):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            cycle = torch.optim.lr_scheduler.OneCycleLR(made, 0.05, total_steps=40)
            return [made], [{"scheduler": cycle, "interval": "step"}]

    module, states = Cycled(optimizer=optimizer), []

    def look(trainer, pl_module):
        if trainer.global_step == 3:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            states.append(TrainingState(pl_module, trainer.optimizers, schedulers))
        elif trainer.global_step in (8, 13):
            states[0].restore()
        if trainer.global_step == 8:
            with torch.no_grad():
                pl_module.net.head.weight += 1  # another branch

    fit(module, After(look), data=loader(Subset(images(), range(8))), epochs=18)
    assert len(module.losses) == 18
    assert module.losses[13:18] == module.losses[3:8] != module.losses[8:13]


class Noisy(torch.optim.SGD):
    """With a generator, a deque and an object of the user's own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.generator, self.last, self.seen = torch.Generator().manual_seed(0), deque([0.0]), Count()

    def step(self, closure=None):
        super().step(closure)
        self.seen.steps += 1
        self.last.append(float(torch.randn((), generator=self.generator)) + self.last[-1])
        for parameter in self.param_groups[0]["params"]:
            parameter.data += 0.01 * self.last[-1] * self.seen.steps


class Count:
    steps = 0


def test_what_an_optimizer_alone_knows_returns():
    """Its parameters, and attributes that are no numbers or tensors."""
    layer, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    optimizer = Noisy([*layer.parameters(), scale])

    def step():
        optimizer.zero_grad()
        loss = (layer(torch.randn(3, 2)) * scale).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item(), scale.item(), len(optimizer.last), optimizer.seen.steps

    step()
    state = TrainingState(layer, [optimizer])
    first = [step(), step()]
    for _ in range(2):
        state.restore()
        assert [step(), step()] == first


def test_parameters_return_alone():
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    state, before = TrainingState(layer, [optimizer]), layer.weight.tolist()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.restore_parameters()
    assert layer.weight.tolist() == before
    assert layer.weight.grad is not None
    assert optimizer.state[layer.weight]["momentum_buffer"] is not None
