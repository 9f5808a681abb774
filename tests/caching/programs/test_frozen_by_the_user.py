"""Layers that the user has frozen in front of the first layer module: left out with it, if nothing else reads them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.caching.parts import CLASSES, Classifier, Stepping, Validated, grid, images, loader, on


def _conv(inputs=4, inplace=False):
    return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace))


class Transfer(nn.Module):
    """A backbone that does not learn, and a head of two layer modules and a classifier."""

    def __init__(self, joins=torch.flatten, width=144, **backbone):
        super().__init__()
        self.stem, self.body = _conv(1, **backbone), _conv(**backbone)
        self.first, self.second, self.head = nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.joins = joins

    @property
    def parts(self):
        return self.stem, self.body

    def features(self, x):
        return self.body(self.stem(x))

    def forward(self, x):
        x = self.joins(self.features(x), 1) if self.joins is torch.flatten else self.joins(self.features(x))
        return self.head(self.second(self.first(x).tanh()).tanh())


class Pieces(Transfer):
    """The parts of the stem are called one by one."""

    def features(self, x):
        for part in self.stem:
            x = part(x)
        return self.body(x)


class Between(Transfer):
    """A function stands between the parts."""

    def features(self, x):
        return self.body(F.max_pool2d(self.stem(x), 1))


class WithoutGradients(Transfer):
    def features(self, x):
        with torch.no_grad():
            return super().features(x)


class Packed(Transfer):
    """The backbone returns a dictionary, of which most is not used."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = _conv()

        def forward(self, x):
            return {"all": self.conv(x), "mean": x.mean((1, 2, 3)), "name": "body"}

    def __init__(self):
        super().__init__()
        self.body = self.Body()

    def features(self, x):
        return super().features(x)["all"]


class Skipping(Transfer):
    """A layer behind the boundary reads the stem, too."""

    def __init__(self):
        super().__init__(joins=torch.flatten)
        self.late = nn.Linear(144, 8)

    def forward(self, x):
        stem = self.stem(x)
        x = self.second(self.first(self.body(stem).flatten(1)).tanh()).tanh()
        return self.head(x + self.late(stem.flatten(1)))


class ReadByFunction(Transfer):
    def forward(self, x):
        features = self.features(x).flatten(1)
        x = self.second(self.first(features).tanh()).tanh()
        return self.head(x + features[:, :8])


def frozen(net, evaluates=True):
    for part in net.parts:
        part.requires_grad_(False)
        part.train(not evaluates)
    return net


def _taught(module, x, y):
    with torch.no_grad():
        wanted = module.teacher(x)
    logits = module.net(x)
    return F.cross_entropy(logits, y) + F.mse_loss(logits, wanted)


NETS = {
    "flattened": Transfer,
    "in place": lambda: Transfer(inplace=True),
    "one position": lambda: Transfer(lambda x: x[:, :, 0, 0], 4),
    "mean": lambda: Transfer(lambda x: x.mean((2, 3)), 4),
    "pieces": Pieces,
    "between": Between,
    "no gradients": WithoutGradients,
    "packed": Packed,
    "skip": Skipping,
    "read by a function": ReadByFunction,
}
# Something else reads the backbone, or a function whose output nobody can follow.


@pytest.mark.parametrize("name", NETS)
def test_backbone(compare, name):
    def program(run):
        run.fit(Classifier(frozen(NETS[name]())), loader(images()), schedule={2: 1}, max_epochs=8)

    cached = compare(program, served=True)
    assert cached.caches[0].stats.not_loaded > 0


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("how", grid(["once", "each epoch", "each step"], every=3))
def test_modes_of_the_backbone(compare, evaluates, how):
    """Whatever mode the user puts it into, and when."""

    def program(run):
        def put(trainer, module, *batch):
            frozen(module.net, evaluates)

        hook = {"once": "on_fit_start", "each epoch": "on_train_epoch_start", "each step": "on_train_batch_start"}[how]
        net = frozen(Transfer(), evaluates)
        run.fit(Classifier(net), loader(images()), on(**{hook: put}), schedule={2: 1}, max_epochs=8)

    compare(program)


def test_teacher_is_no_part_of_the_front(compare):
    def program(run):
        module = Stepping(_taught, frozen(Transfer()))
        module.teacher = copy.deepcopy(module.net).requires_grad_(False)
        run.fit(module, loader(images()), schedule={2: 1}, max_epochs=8)

    compare(program)


def test_backbone_whose_weights_change(compare):
    """By the user's own hand, in the middle of training: what was cached of it is not used."""

    def program(run):
        def change(trainer, module, *batch):
            if trainer.current_epoch == 4:
                module.net.stem[0].weight.data.mul_(1.5)

        run.fit(
            Classifier(frozen(Transfer())),
            loader(images()),
            on(on_train_epoch_start=change),
            schedule={2: 1},
            max_epochs=8,
        )

    compare(program)


def test_backbone_that_is_released(compare):
    """As by `BackboneFinetuning`: everything trains then, and freezes later."""

    def program(run):
        def release(trainer, module):
            if trainer.current_epoch == 4:
                for part in module.net.parts:
                    part.requires_grad_(True)
                new = [parameter for part in module.net.parts for parameter in part.parameters()]
                trainer.optimizers[0].add_param_group({"params": new})

        module = Classifier(frozen(Transfer()))
        module.configure_optimizers = lambda: torch.optim.SGD(
            [parameter for parameter in module.parameters() if parameter.requires_grad], lr=0.05
        )
        run.fit(module, loader(images()), on(on_train_epoch_start=release), schedule={2: 1}, max_epochs=8)

    compare(program, freezes=False)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_backbone_with_dropout(compare, rate):
    """Its output must be the same in each epoch: dropout in it is off, as in frozen layers."""

    def program(run):
        net = frozen(Transfer(), evaluates=False)
        net.body.append(nn.Dropout(rate))
        run.fit(Classifier(net), loader(images()), schedule={2: 1}, max_epochs=8)

    compare(program)


class Probe(nn.Module):
    """A backbone that does not learn, and a linear layer behind it."""

    def __init__(self, call=lambda net, x: net.body(net.stem(x)).flatten(1), width=144, dropout=0.0):
        super().__init__()
        self.stem, self.body = _conv(1), nn.Sequential(*_conv(), nn.Dropout(dropout))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, CLASSES)
        self.call = call

    @property
    def parts(self):
        return self.stem, self.body

    def forward(self, x):
        return self.head(self.call(self, x))


def _under_no_grad(net, x):
    with torch.no_grad():
        return net.body(net.stem(x)).flatten(1)


def _twice(net, x):
    features = [net.body(net.stem(one)).flatten(1) for one in (x, x.flip(3))]
    return (features[0] + features[1]) / 2


def _read_again(net, x):
    features = net.body(net.stem(x)).flatten(1)
    return features + net.stem(x).flatten(1)


PROBES = {
    "flattened": lambda: Probe(),
    "mean": lambda: Probe(lambda net, x: net.body(net.stem(x)).mean((2, 3)), 4),
    "pool": lambda: Probe(lambda net, x: net.pool(net.body(net.stem(x))).flatten(1), 4),
    "no gradients": lambda: Probe(_under_no_grad),
    "twice": lambda: Probe(_twice),
    "between": lambda: Probe(lambda net, x: net.body(F.max_pool2d(net.stem(x), 2)).flatten(1), 36),
    "in two places": lambda: Probe(_read_again),
}


@pytest.mark.parametrize("name", PROBES)
def test_linear_probe(compare, name):
    def program(run):
        run.fit(Classifier(frozen(PROBES[name]())), loader(images()), val=loader(images(12, seed=2), shuffle=False))

    (cache,) = compare(program, freezes=False).caches
    assert cache.stats.not_loaded > 0


def test_probe_of_a_module_that_validates(compare):
    def program(run):
        module = Validated(frozen(Probe()))
        run.fit(module, loader(images()), val=loader(images(12, seed=2), shuffle=False), max_epochs=6)

    (cache,) = compare(program, freezes=False).caches
    assert cache.validation_stats.hits > 0


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_probe_whose_backbone_is_in_training_mode(compare, rate):
    """Statistics that move are no part of what is cached; dropout turns the cache off."""

    def program(run):
        run.fit(Classifier(frozen(Probe(dropout=rate), evaluates=False)), loader(images()))

    compare(program, freezes=False, served=None)


def test_probe_whose_backbone_is_released(compare):
    def program(run):
        def release(trainer, module):
            if trainer.current_epoch == 3:
                new = [parameter for part in module.net.parts for parameter in part.parameters()]
                for parameter in new:
                    parameter.requires_grad_(True)
                trainer.optimizers[0].add_param_group({"params": new})

        module = Classifier(frozen(Probe()))
        module.configure_optimizers = lambda: torch.optim.SGD(module.net.head.parameters(), lr=0.05)
        run.fit(module, loader(images()), on(on_train_epoch_start=release), schedule={}, max_epochs=6)

    compare(program, freezes=False)


def test_probe_that_goes_on_from_a_checkpoint(compare):
    def program(run):
        def module():
            torch.manual_seed(0)
            return Classifier(frozen(Probe()))

        file = run.folder / "last.ckpt"
        run.fit(module(), loader(images()), max_epochs=3).save_checkpoint(file)
        run.fit(module(), loader(images()), ckpt_path=file, max_epochs=6)

    compare(program, freezes=False)


def test_probe_beside_a_teacher(compare):
    def program(run):
        module = Stepping(_taught, frozen(Probe()))
        module.teacher = copy.deepcopy(module.net).requires_grad_(False).eval()
        run.fit(module, loader(images()), max_epochs=8)

    compare(program, freezes=False)


class LooksAtItsMode(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


def test_layers_that_look_at_their_mode_are_told(compare, caplog):
    def program(run):
        caplog.clear()
        net = frozen(Transfer(), evaluates=False)
        net.body.append(LooksAtItsMode())
        run.fit(Classifier(net), loader(images()), schedule={2: 1}, max_epochs=8)

    with caplog.at_level("INFO"):
        compare(program)
    told = "frozen layers whose output depends on the mode, such as 'net.body.3', are in evaluation mode"
    assert caplog.text.count(told) == 1


class Augmented(nn.Module):
    """A module that augments in training stands in front of the network."""

    class Noise(nn.Module):
        def forward(self, x):
            return x + 0.1 * torch.randn_like(x) if self.training else x

    def __init__(self):
        super().__init__()
        self.noise, self.net = self.Noise(), Transfer()
        self.parts = self.net.parts

    def forward(self, x):
        return self.net(self.noise(x))


@pytest.mark.parametrize("freezes", [True, False])
def test_augmentation_in_front_is_no_frozen_layer(compare, freezes):
    def program(run):
        net = frozen(Augmented()) if freezes else Augmented()
        run.fit(Classifier(net), loader(images()), schedule={2: 1}, max_epochs=4)

    compare(program, served=False)
