"""Networks of many kinds in front of and behind the boundary."""

import pytest
import torch
from torch import nn

from support.caching.parts import CLASSES, Chain, Classifier, ConvNet, block, grid, images, loader


class Returns(nn.Module):
    """A layer whose output is packed by ``pack``."""

    def __init__(self, pack):
        super().__init__()
        self.linear, self.pack = nn.Linear(8, 8), pack

    def forward(self, x):
        return self.pack(self.linear(x).tanh())


class Twins(nn.Module):
    """Two tensors in, two tensors out."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair):
        left, right = pair
        return self.left(left).tanh(), self.right(right).tanh() + left


def _detached(net, x):
    with torch.no_grad():
        front = net.b(net.a(x))
    return net.head(net.c(front))


def _normed():
    return block(nn.Linear(8, 8), nn.BatchNorm1d(8))


def _deep():
    return block(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())


def _shared_layers():
    layer = nn.Linear(8, 8)
    return Chain(a=block(layer, nn.ReLU()), b=block(layer, nn.Tanh()), c=_deep())


def _tied():
    net = Chain(c=_deep())
    net.b[0].weight = net.a[0].weight
    return net


def _frozen_by_the_user():
    net = Chain(a=block(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()), c=_deep())
    net.a.requires_grad_(False)
    return net


VECTOR_NETS = {
    "plain": Chain,
    "tuple at the boundary": lambda: Chain(
        b=Returns(lambda x: (x, x.sum())), call=lambda n, x: n.head(n.c(n.b(n.a(x))[0]))
    ),
    "dict at the boundary": lambda: Chain(
        b=Returns(lambda x: {"x": x}), call=lambda n, x: n.head(n.c(n.b(n.a(x))["x"]))
    ),
    "list at the boundary": lambda: Chain(b=Returns(lambda x: [x]), call=lambda n, x: n.head(n.c(n.b(n.a(x))[0]))),
    "two tensors": lambda: Chain(Twins(), Twins(), Twins(), call=lambda n, x: n.head(sum(n.c(n.b(n.a((x, -x))))))),
    "in place behind": lambda: Chain(b=_normed(), c=block(nn.ReLU(inplace=True), nn.Linear(8, 8))),
    "in place in front": lambda: Chain(a=block(nn.Linear(8, 8), nn.ReLU(inplace=True))),
    "in place on the input": lambda: Chain(a=block(nn.ReLU(inplace=True), nn.Linear(8, 8))),
    "add_ behind": lambda: Chain(b=_normed(), call=lambda n, x: n.head(n.c(n.b(n.a(x)).add_(1)))),
    "residual behind": lambda: Chain(call=lambda n, x: n.head((h := n.b(n.a(x))) + n.c(h))),
    "residual in front": lambda: Chain(call=lambda n, x: n.head(n.c((h := n.a(x)) + n.b(h)))),
    "residual from the input": lambda: Chain(call=lambda n, x: n.head(n.c(x + n.b(n.a(x))))),
    "long residual": lambda: Chain(call=lambda n, x: n.head((h := n.a(x)) + n.c(n.b(h)))),
    "boundary is detached": lambda: Chain(
        call=lambda n, x: n.head(n.c(n.b(n.a(x)).detach())) + n.b(n.a(x)).sum() * 0.0
    ),
    "shared layer": _shared_layers,
    "tied weights": _tied,
    "layer norm": lambda: Chain(a=block(nn.Linear(8, 8), nn.LayerNorm(8)), b=block(nn.Linear(8, 8), nn.RMSNorm(8))),
    "group norm": lambda: Chain(a=block(nn.Linear(8, 8), nn.GroupNorm(2, 8))),
    "statistics of the batch": lambda: Chain(b=block(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False))),
    "double inside": lambda: Chain(a=Returns(lambda x: x.double().sin().float())),
    "half at the boundary": lambda: Chain(
        b=Returns(lambda x: x.half()), call=lambda n, x: n.head(n.c(n.b(n.a(x)).float()))
    ),
    "bfloat16 at the boundary": lambda: Chain(
        b=Returns(lambda x: x.bfloat16()), call=lambda n, x: n.head(n.c(n.b(n.a(x)).float()))
    ),
    "wider": lambda: Chain(b=block(nn.Linear(8, 24), nn.ReLU()), c=block(nn.Linear(24, 8))),
    "keyword arguments": lambda: Chain(call=lambda n, x: n.head(n.c(input=n.b(input=n.a(input=x))))),
    "empty block": lambda: Chain(b=block(nn.Identity(), nn.Linear(8, 8))),
    "bilinear": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x) * x)))),
    "input twice": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x) + n.a(x))))),
    "in pieces": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(torch.cat([n.a(half) for half in x.chunk(2)]))))),
    "rows in a loop": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(torch.stack([n.a(row) for row in x]))))),
    "value decides": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x) if x.sum() > 0 else n.a(-x))))),
    "width is folded": lambda: Chain(
        call=lambda n, x: n.head(n.c(n.b(n.a(x.view(-1, 8))).view(len(x), -1, 8)).mean(1))
    ),
    "noise in front": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x) + torch.randn_like(x))))),
    "noise behind": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x)) + torch.randn(len(x), 8)))),
    "stochastic depth": lambda: Chain(
        call=lambda n, x: n.head(n.c(n.b(h) if torch.rand(()) < 0.8 else h)) if (h := n.a(x)) is not None else 0
    ),
    "counter in a buffer": lambda: _with_counter(),
    "permuted rows": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x)).flip(0)).flip(0))),
    "reads the mode": lambda: Chain(call=lambda n, x: n.head(n.c(n.b(n.a(x) * (2 if n.training else 1))))),
    "reads grad mode": lambda: Chain(
        call=lambda n, x: n.head(n.c(n.b(n.a(x) * (2 if torch.is_grad_enabled() else 1))))
    ),
    "Python state": lambda: _with_python_counter(),
}


class _Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls)


class _CountsInPython(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


def _with_counter():
    return Chain(a=block(nn.Linear(8, 8), _Counts()))


def _with_python_counter():
    return Chain(a=block(nn.Linear(8, 8), _CountsInPython()))


EITHER = {
    "shared layer",
    "tied weights",
    "statistics of the batch",
    "noise in front",
    "stochastic depth",
    "Python state",
}
EITHER |= {"counter in a buffer", "residual from the input", "long residual", "input twice", "boundary is detached"}
EITHER |= {"in pieces", "rows in a loop", "value decides", "two tensors", "bilinear"}


DEPTHS = {"shared layer": 1, "tied weights": 1, "input twice": 1, "in pieces": 1, "rows in a loop": 1}


@pytest.mark.parametrize("name", grid(list(VECTOR_NETS), every=4))
def test_network(compare, name):
    def program(run):
        run.fit(Classifier(VECTOR_NETS[name]()), schedule={2: DEPTHS.get(name, 2)})

    compare(program, served=None if name in EITHER else True)


@pytest.mark.parametrize("name", ["detached front", "front frozen by the user"])
def test_front_that_never_trained(compare, name):
    nets = {"detached front": lambda: Chain(c=_deep(), call=_detached), "front frozen by the user": _frozen_by_the_user}
    compare(lambda run: run.fit(Classifier(nets[name]()), schedule={2: 1}), served=None)


def test_stem_frozen_by_the_user_with_moving_statistics(compare):
    """What is recorded of the stem ends at its running statistics: the front begins with its output."""

    def program(run):
        net = Chain(a=block(nn.Linear(8, 8), nn.BatchNorm1d(8)), b=_deep(), c=_deep())
        net.a.requires_grad_(False)
        run.fit(Classifier(net), schedule={2: 1})
        run.fit(Classifier(frozen_in_evaluation()), schedule={2: 1})

    def frozen_in_evaluation():
        net = Chain(a=block(nn.Linear(8, 8), nn.BatchNorm1d(8)), b=_deep(), c=_deep())
        net.a.requires_grad_(False).eval()
        return net

    moving, still = compare(program, served=None).caches
    assert still.stats.hits > 0
    assert moving.stats.off is None or "another way" not in moving.stats.off


# For images.
class Pools(nn.Module):
    def __init__(self, front, back):
        super().__init__()
        self.a, self.b, self.c, self.head = *front, back, nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.c(self.b(self.a(x))).mean((2, 3)))


def _conv(inputs=4, **options):
    return nn.Sequential(nn.Conv2d(inputs, 4, 3, **{"padding": 1} | options), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


IMAGE_NETS = {
    "pooling": lambda: Pools([block(_conv(1), nn.MaxPool2d(2)), _conv()], _conv()),
    "strides": lambda: Pools([_conv(1, stride=2), _conv()], _conv(stride=2)),
    "depthwise": lambda: Pools([_conv(1), _conv(groups=4)], _conv()),
    "channels_last": lambda: ConvNet().to(memory_format=torch.channels_last),
    "transposed": lambda: Pools([_conv(1), block(nn.ConvTranspose2d(4, 4, 2, stride=2), nn.ReLU())], _conv()),
    "interpolated": lambda: Pools([_conv(1), block(_conv(), nn.Upsample(scale_factor=2))], _conv()),
    "instance norm": lambda: Pools([block(_conv(1), nn.InstanceNorm2d(4)), _conv()], _conv()),
    "local response": lambda: Pools([block(_conv(1), nn.LocalResponseNorm(2)), _conv()], _conv()),
    "circular": lambda: Pools([_conv(1, padding_mode="circular"), _conv()], _conv()),
    "gated": lambda: Pools([block(nn.Conv2d(1, 8, 3), nn.GLU(1)), _conv()], _conv()),
    "dropout behind": lambda: Pools([_conv(1), _conv()], block(_conv(), nn.Dropout2d(0.3))),
}


@pytest.mark.parametrize("net", grid(IMAGE_NETS, every=4))
@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_network_for_images(compare, net, precision):
    compare(lambda run: run.fit(Classifier(net()), loader(images()), precision=precision))


def _timm(name, **options):
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, in_chans=1, **options)


def _vision_transformer():
    from timm.models import VisionTransformer

    return VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, embed_dim=16, depth=3, num_heads=2, num_classes=CLASSES
    )


@pytest.mark.parametrize("dropout", grid([False, True], every=4))
def test_vision_transformer_of_timm(compare, dropout):
    def program(run):
        net = _vision_transformer()
        if dropout:
            net.pos_drop.p = 0.3
        run.fit(Classifier(net), loader(images(size=8)))

    compare(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenetv3_small_050", "convnext_atto", "efficientnet_b0", "regnetx_002"]
)
def test_networks_of_timm(compare, name):
    def program(run):
        run.fit(Classifier(_timm(name)), loader(images(size=32)), max_epochs=4)

    compare(program, served=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1", "densenet121"])
def test_networks_of_torchvision(compare, name):
    import torchvision

    def program(run):
        net = getattr(torchvision.models, name)(num_classes=CLASSES)
        run.fit(Classifier(net), loader(images(channels=3, size=32)), max_epochs=4)

    compare(program, served=None)


class _Layout(nn.Module):
    """A layer whose output is laid out in memory in an odd way."""

    def __init__(self, layout, out=8):
        super().__init__()
        self.linear, self.layout = nn.Linear(8, out), layout

    def forward(self, x):
        return self.layout(torch.tanh(self.linear(x)))


LAYOUTS = {
    "samples last": (8, lambda x: x.t().contiguous().t()),
    "half of a tensor": (16, lambda x: x.chunk(2, 1)[1]),
    "transposed": (16, lambda x: x.view(-1, 2, 8).transpose(1, 2)[..., 0]),
    "expanded": (8, lambda x: x[:, :1].expand(-1, 8)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_output_comes_back_with_its_strides(compare, name):
    def program(run):
        def call(net, x):
            between = net.b(net.a(x))
            run.note(between.stride())
            return net.head(net.c(between))

        out, layout = LAYOUTS[name]
        net = Chain(b=_Layout(layout, out), call=call)
        run.fit(Classifier(net), schedule={2: 1, 6: 2} if out == 8 else None, max_epochs=5)

    compare(program)


class _Carries(nn.Module):
    """A layer that adds what it made of the batch before."""

    def __init__(self):
        super().__init__()
        self.linear, self.before = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x):
        made = torch.tanh(self.linear(x)) + self.before
        self.before = made.detach().mean(0)
        return made


def test_front_that_carries_a_state(compare):
    """The trial leaves the state alone."""
    compare(lambda run: run.fit(Classifier(Chain(a=_Carries())), max_epochs=5), served=None)


class _Distinct(nn.Module):
    def forward(self, x):
        if len({*x[:, 0].tolist()}) < len(x):
            raise ValueError("two samples are the same")
        return x


def test_layer_that_refuses_other_batches(compare):
    """The trial repeats samples in a batch; the program never does."""
    compare(lambda run: run.fit(Classifier(Chain(a=block(nn.Linear(8, 8), _Distinct())))), served=False)
