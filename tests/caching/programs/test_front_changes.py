"""The frozen front changes after all: its weights, buffers, settings, hooks or modules."""

import copy
import types

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune, weight_norm

from support.caching.parts import (
    WORKERS,
    Chain,
    Classifier,
    ConvNet,
    Net,
    Stepping,
    Validated,
    at,
    grid,
    images,
    loader,
    on,
)


def _no_grad(change):
    def changed(net):
        with torch.no_grad():
            change(net)

    return changed


class _Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def _swapped(net):
    net.a[0].weight.data, net.b[0].weight.data = net.b[0].weight.data, net.a[0].weight.data


# What a callback does to `Net` once, between two batches: by name.
CHANGES = {
    "mul_": _no_grad(lambda net: net.a[0].weight.mul_(1.5)),
    "one value": _no_grad(lambda net: net.a[0].weight[3].__setitem__(4, 0.25)),
    "last value of the bias": _no_grad(lambda net: net.b[0].bias.__setitem__(-1, 0.25)),
    "copy_": _no_grad(lambda net: net.a[0].weight.copy_(torch.eye(8))),
    "data copy_": lambda net: net.a[0].weight.data.copy_(torch.eye(8)),
    "data one value": lambda net: net.a[0].weight.data.view(-1)[37:38].fill_(0.5),
    "data mul_": lambda net: net.b[0].weight.data.mul_(1.5),
    "data replaced": lambda net: setattr(net.a[0].weight, "data", torch.eye(8)),
    "data swapped": _swapped,
    "detached": lambda net: net.a[0].weight.detach().mul_(2),
    "numpy": lambda net: net.a[0].weight.detach().numpy().__imul__(2),
    "load_state_dict": lambda net: net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()}, strict=False),
    "load assigned": lambda net: net.a.load_state_dict(
        {k: v * 1.5 if v.is_floating_point() else v for k, v in net.a.state_dict().items()}, assign=True
    ),
    "reset": lambda net: net.a[0].reset_parameters(),
    "init": lambda net: nn.init.orthogonal_(net.b[0].weight),
    "running mean": lambda net: net.a[1].running_mean.add_(1),
    "running mean data": lambda net: net.a[1].running_mean.data.add_(1),
    "running variance replaced": lambda net: setattr(net.a[1], "running_var", torch.full((8,), 2.0)),
    "running statistics reset": lambda net: net.b[1].reset_running_stats(),
    "eps": lambda net: setattr(net.a[1], "eps", 0.5),
    "parameter replaced": lambda net: setattr(net.a[0], "weight", nn.Parameter(torch.eye(8), requires_grad=False)),
    "bias removed": lambda net: setattr(net.b[0], "bias", None),
    "module replaced": lambda net: net.a.__setitem__(2, nn.ReLU()),
    "layer replaced": lambda net: net.a.__setitem__(0, nn.Linear(8, 8).requires_grad_(False)),
    "block replaced": lambda net: setattr(net, "a", copy.deepcopy(net.a).requires_grad_(False)),
    "module removed": lambda net: net.a.__delitem__(2),
    "module added": lambda net: net.a.append(nn.Hardtanh(-0.5, 0.5)),
    "forward replaced": lambda net: setattr(net.a[2], "forward", torch.relu),
    "forward of the block": lambda net: setattr(net.a, "forward", lambda x: x * 2),
    "class changed": lambda net: setattr(net.a[2], "__class__", nn.Softsign),
    "output hook": lambda net: net.a.register_forward_hook(lambda part, args, out: out * 2),
    "input hook": lambda net: net.b.register_forward_pre_hook(lambda part, args: (args[0] + 1,)),
    "network hook": lambda net: net.register_forward_pre_hook(lambda part, args: (args[0] + 1,)),
    "parametrized": lambda net: parametrize.register_parametrization(net.a[0], "weight", _Doubled()),
    "pruned": lambda net: prune.l1_unstructured(net.a[0], "weight", 0.5),
    "double": lambda net: net.a[0].weight.data.copy_(net.a[0].weight.data.double().cos()),
    "order of use": lambda net: net.a.insert(0, net.a.pop(2)),
    "shared": lambda net: setattr(net.b[0], "weight", net.a[0].weight),
    "train": lambda net: net.train(),
    "evaluation": lambda net: net.eval(),
    "trains again": lambda net: net.a.requires_grad_(True),
    "one trains again": lambda net: net.b[0].weight.requires_grad_(True),
}


def _hits(run):
    return sum(cached.stats.hits for cached in run.caches)


@pytest.mark.parametrize(("change", "place"), grid(CHANGES, ["batch end", "batch start", "in the step"], every=17))
def test_front_is_changed_once(compare, change, place):
    def program(run):
        def now(trainer, module, *_):
            if run.batches == 10:
                run.hits_before = _hits(run)
                change(module.net)

        def step(module, x, y):
            if place == "in the step":
                now(None, module)
            return F.cross_entropy(module.net(x), y)

        changes = {"batch end": on(on_train_batch_end=now), "batch start": on(on_train_batch_start=now)}
        run.fit(Stepping(step), None, *[changes[place]] if place in changes else [], max_epochs=9)

    run = compare(program)
    assert _hits(run) > run.hits_before + 12 or run.messages, "the cache is of no use any longer, and does not say so"


class _Scaled(nn.Module):
    """A layer that reads a setting in an object of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.settings = nn.Linear(8, 8), types.SimpleNamespace(scale=1.0)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.settings.scale


def test_setting_of_a_layer_changes(compare):
    def program(run):
        change = at(6, lambda _, module: setattr(module.net.a.settings, "scale", 0.5))
        run.fit(Classifier(Chain(a=_Scaled())), None, change, max_epochs=5)

    assert compare(program).messages


@pytest.mark.parametrize("part", ["a", "b"])
def test_user_trains_the_front_again(compare, part):
    def program(run):
        def step(module, x, y):
            if run.batches == 9:
                getattr(module.net, part).requires_grad_(True)
            return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step, Chain()), max_epochs=5)

    compare(program)


# In each step: a front that is never the same again. The cache has nothing to give.
MOVING = {
    "weights": _no_grad(lambda net: net.a[0].weight.mul_(0.99)),
    "data": lambda net: net.a[0].weight.data.mul_(0.99),
    "one value": lambda net: net.b[0].weight.data.view(-1)[5:6].mul_(0.9),
    "running mean": lambda net: net.a[1].running_mean.add_(0.01),
    "eps": lambda net: setattr(net.a[1], "eps", net.a[1].eps * 1.5),
    "noise": _no_grad(lambda net: net.a[0].weight.add_(torch.randn(8, 8), alpha=0.01)),
}


HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step"]


@pytest.mark.parametrize(("change", "hook"), grid(MOVING, HOOKS, every=7))
def test_front_is_changed_in_each_step(compare, change, hook):
    def program(run):
        def moves(trainer, module, *_):
            change(module.net)

        run.fit(Classifier(), None, on(**{hook: moves}))

    compare(program, served=None)


def test_front_is_clipped_after_the_freeze(compare):
    """The last step before it has left values that the next clipping changes, once."""

    def program(run):
        def clip(trainer, module, *_):
            with torch.no_grad():
                for parameter in module.net.a.parameters():
                    parameter.clamp_(-0.1, 0.1)

        run.fit(Classifier(), None, on(on_train_batch_end=clip), max_epochs=5)

    (cache,) = compare(program).caches
    assert cache.stats.off is None


@pytest.mark.parametrize("step", [6, 9])
def test_front_is_changed_and_gets_deeper(compare, step):
    """Entries of the shallower front, before its weights changed, are of no use for the deeper one."""

    def program(run):
        change = at(step, lambda _, module: module.net.a[0].weight.data.mul_(1.5))
        schedule = {2: 1, 10: 2}
        run.fit(Validated(), None, change, val=loader(shuffle=False), schedule=schedule, max_epochs=5)

    compare(program, served=None)


def test_front_is_changed_for_one_forward(compare):
    """Weights are moved for the forward of each third batch, and moved back."""

    def program(run):
        def step(module, x, y):
            moved = run.batches % 3 == 2
            if moved:
                module.net.a[0].weight.data.mul_(2)
            loss = F.cross_entropy(module.net(x), y)
            if moved:
                module.net.a[0].weight.data.div_(2)
            return loss

        run.fit(Stepping(step))

    compare(program, served=None)  # the weights do not come back to the last bit


# Weight averaging.
class SwapsForValidation(Validated):
    """Validates with the moving average of all weights, and gives them back."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net.state_dict())

    def on_train_batch_end(self, *_):
        for name, value in self.net.state_dict().items():
            self.average[name] = torch.lerp(self.average[name].float(), value.float(), 0.3).to(value.dtype)

    def on_validation_start(self):
        self.own = copy.deepcopy(self.net.state_dict())
        self.net.load_state_dict(self.average)

    def on_validation_end(self):
        self.net.load_state_dict(self.own)


def test_weights_are_swapped_for_validation(compare):
    compare(lambda run: run.fit(SwapsForValidation(), val=loader(shuffle=False), val_check_interval=2))


@pytest.mark.parametrize("interval", [1, 3])
def test_moving_average_of_lightning(compare, interval):
    def program(run):
        module = Validated()
        run.fit(module, None, EMAWeightAveraging(decay=0.5, update_every_n_steps=interval), val=loader(shuffle=False))

    compare(program)


@pytest.mark.parametrize("net", [Net, ConvNet])
def test_stochastic_weight_averaging(compare, net):
    def program(run):
        data = loader(images()) if net is ConvNet else None
        run.fit(Validated(net()), data, StochasticWeightAveraging(0.02, swa_epoch_start=2), max_epochs=4)

    compare(program)


def test_averaged_model_of_torch(compare):
    class Averaged(Classifier):
        def __init__(self):
            super().__init__()
            self.average = torch.optim.swa_utils.AveragedModel(self.net)

        def validation_step(self, batch, batch_idx):
            self.log("val", F.cross_entropy(self.average(batch[0]), batch[1]))

    def program(run):
        module = Averaged()
        update = on(on_train_batch_end=lambda t, m, *_: m.average.update_parameters(m.net))
        run.fit(module, None, update, val=loader(shuffle=False))

    compare(program)


def test_running_statistics_are_recomputed(compare):
    """`update_bn` over the training loader, at the end of each epoch."""

    def program(run):
        def update(trainer, module):
            twin = copy.deepcopy(module.net)
            torch.optim.swa_utils.update_bn((x for x, _ in trainer.train_dataloader), twin)
            run.note(dict(twin.named_buffers()))

        run.fit(Classifier(), None, on(on_train_epoch_end=update))

    compare(program)


# The depth changes.
SCHEDULES = {
    "deeper": {2: 1, 6: 2},
    "deeper at once": {2: 1, 3: 2},
    "unfreeze": {2: 2, 8: 0},
    "again": {2: 2, 6: 0, 8: 2},
    "again at once": {2: 2, 6: 0, 7: 2},
    "shallower": {2: 2, 7: 1},
    "back and forth": {1: 1, 5: 2, 7: 1, 10: 2, 13: 0, 15: 1},
    "first step": {1: 2},
    "each epoch": {4: 1, 8: 2, 12: 0, 16: 1},
}


@pytest.mark.parametrize(("schedule", "net"), grid(SCHEDULES, [Net, ConvNet], every=7))
@WORKERS
def test_depth_changes(compare, schedule, workers, net):
    def program(run):
        data = loader(images() if net is ConvNet else None, num_workers=workers)
        run.fit(Validated(net()), data, val=loader(data.dataset, shuffle=False), schedule=schedule, max_epochs=6)

    compare(program, served=None if workers else True)  # workers are ahead by an epoch of this length


@pytest.mark.parametrize("schedule", grid(SCHEDULES, every=3))
def test_depth_changes_while_entries_are_written(compare, schedule):
    def program(run):
        run.fit(Validated(), None, val=loader(shuffle=False), schedule=schedule, max_epochs=6)

    compare(program, disk_seconds=0.005, served=None)


@pytest.mark.parametrize("net", [Net, ConvNet])
def test_reads_while_the_depth_changes(compare, net):
    def program(run):
        def look(trainer, module, outputs, batch, batch_idx):
            if run.batches % 3 == 2:
                run.note(batch[0].mean())

        schedule = {1: 1, 4: 2, 9: 0, 11: 2}
        data = loader(images()) if net is ConvNet else None
        run.fit(Classifier(net()), data, on(on_train_batch_end=look), schedule=schedule, max_epochs=5)

    compare(program)


def test_slow_running_statistics_settle_first(compare):
    def program(run):
        net = Net()
        net.a[1].momentum = net.b[1].momentum = 0.01
        run.fit(Classifier(net), schedule={2: 2}, max_epochs=14)

    compare(program)


@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_dropout_in_the_front(compare, dropout):
    compare(lambda run: run.fit(Classifier(Net(dropout=dropout))))


def test_dropout_in_the_front_changes(compare):
    def program(run):
        run.fit(Classifier(Net(dropout=0.1)), None, at(10, lambda _, m: setattr(m.net.a[3], "p", 0.5)))

    compare(program)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_user_sets_the_mode_in_each_step(compare, mode):
    def program(run):
        def step(module, x, y):
            getattr(module.net, mode)()
            return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step, Net(dropout=0.3)))

    compare(program)


def test_user_sets_the_mode_of_the_front(compare):
    """``training = True`` by hand: batch normalisation in the front counts the batch again."""

    def program(run):
        def step(module, x, y):
            if run.batches == 10:
                module.net.a[1].training = True
            return F.cross_entropy(module.net(x), y)

        run.fit(Stepping(step))

    compare(program, served=None)


def test_weight_norm_in_the_front(compare):
    def program(run):
        net = Net()
        with torch.no_grad():
            net.a[0] = weight_norm(net.a[0]) if not hasattr(parametrize, "weight_norm") else net.a[0]
            nn.utils.parametrizations.weight_norm(net.b[0])
        run.fit(Classifier(net))

    compare(program)


def test_spectral_norm_in_the_front(compare):
    """Its power iteration changes a buffer in each forward of training."""

    def program(run):
        net = Net()
        nn.utils.parametrizations.spectral_norm(net.a[0])
        run.fit(Classifier(net))

    compare(program, served=None)


def _deep(value):
    for _ in range(12):
        value = {"inner": value}
    return value


def _bottom(holder):
    while "inner" in holder:
        holder = holder["inner"]
    return holder


def _reorder(holder):
    holder["relu"] = holder.pop("relu")


HOLDERS = {
    "deep": (lambda: _deep({"relu": 1, "tanh": 1}), lambda held: _bottom(held).update(relu=2), True),
    "order": (lambda: {"relu": 1, "tanh": 1}, _reorder, True),
    "many": (lambda: {"relu": 1, "tanh": 1, "table": [[0] for _ in range(3000)]}, lambda h: h.update(relu=2), False),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_change_inside_an_attribute_of_the_front(compare, name):
    """Of 3,000 lists, more than it compares: such a front is not cached."""
    make, change, served = HOLDERS[name]

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = make()

        def forward(self, x):
            for kind, times in _bottom(self.holder).items():
                if kind != "table":
                    x = (F.relu if kind == "relu" else torch.tanh)(x) * times
            return x

    def program(run):
        net = Net()
        net.a[1] = Steps()

        def look(trainer, module, *_):
            if run.batches == 11:
                change(net.a[1].holder)

        run.fit(Classifier(net), loader(), on(on_train_batch_end=look))

    compare(program, served=None if served else False)
