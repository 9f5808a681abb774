"""Networks that a layer chain could stumble over, and what is asked of all of them."""

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.network.chain import LayerChain
from support.repeated_calls import Alternating, InEachPosition, SharedEmbedding, Siamese, UsedTwice


class OutOfOrder(nn.Module):
    """Registered back to front, with activations and normalisation that are functions or shared."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.third = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.first = nn.Linear(4, 6)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop(self.act(self.norm(self.first(x))))
        x = self.drop(self.act(self.second(x)))
        return self.head(F.relu(self.third(x)))


class DictInDictOut(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(3, 6, 3)
        self.number = nn.Linear(4, 6)
        self.blocks = nn.ModuleDict({"b": nn.Linear(6, 6), "a": nn.Linear(6, 6)})
        self.head = nn.Linear(6, 2)

    def forward(self, batch, *, scale=1.0):
        x = self.image(batch["image"]).mean((2, 3)) + scale * self.number(batch["number"])
        for block in self.blocks.values():
            x = F.relu(block(x))
        return {"logits": self.head(x), "features": [x.detach()]}


class Tokens(nn.Module):
    """Containers own parameters: a class token and positions, used between the children's calls."""

    def __init__(self, depth=3):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.rand(1, 7, 8))
        self.cls_token = nn.Parameter(torch.rand(1, 1, 8))
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        x = torch.cat([self.cls_token.expand(len(ids), -1, -1), self.embedding(ids)], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Encoder(nn.Module):
    """Hands padded tokens to nn.TransformerEncoder with a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source, target):
        return self.head(self.transformer(self.source(source), self.target(target)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(12, 6, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        x = F.relu(self.middle(F.max_pool2d(second, 2)))
        x = F.relu(self.up2(torch.cat([F.interpolate(x, scale_factor=2), second], 1)))
        return self.head(F.relu(self.up1(torch.cat([F.interpolate(x, scale_factor=2), first], 1))))


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first, self.second = nn.LSTM(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, ids):
        return self.head(self.second(self.first(self.embedding(ids))[0])[0][:, -1])


class LargeHead(nn.Module):
    """One linear layer holds nearly all the weights; the rest is wrapped in a class of the user's own."""

    def __init__(self):
        super().__init__()
        self.encoder = ConvEncoder()
        self.fc = nn.Linear(6 * 5 * 5, 200)

    def forward(self, x):
        return self.fc(self.encoder(x).flatten(1))


class ConvEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3, stride=2)

    def forward(self, x):
        return F.relu(self.three(F.relu(self.two(F.relu(self.one(x))))))


class TiedHead(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(F.relu(self.b(F.relu(self.a(self.embedding(ids))))))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.text = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.cat([self.image(x), self.text(x)], 1))


class Wrapped(nn.Module):
    """As a LightningModule holds a network: under any name, with a loss and a metric beside it."""

    def __init__(self, net, name):
        super().__init__()
        setattr(self, name, net)
        self.criterion = nn.MSELoss()
        self.unused = nn.Linear(3, 3)
        self.inner = name

    def forward(self, *args, **kwargs):
        return getattr(self, self.inner)(*args, **kwargs)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))


def deep_mlp():
    """Layer modules '0', '4', '7'; head '9'."""
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 6),
        nn.ReLU(),
        nn.Linear(6, 2),
    )


def frozen_front():
    net = deep_mlp()
    net[0].requires_grad_(False)
    net[1].requires_grad_(False).eval()
    return nn.Sequential(net, nn.ReLU(), nn.Linear(2, 2))


def parametrized():
    norms = nn.utils.parametrizations
    return nn.Sequential(
        norms.weight_norm(nn.Linear(4, 6)), norms.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 6), nn.Linear(6, 2)
    )


def ids(*shape):
    made = torch.randint(1, 20, shape)
    made[0, -2:] = 0
    return made


def images(size):
    return torch.rand(2, 3, size, size)


def vision(name, size=32, **kwargs):
    return lambda: (torchvision.models.get_model(name, weights=None, num_classes=5, **kwargs), (images(size),))


def from_timm(name, size=32, **kwargs):
    return lambda: (timm.create_model(name, num_classes=5, **kwargs), (images(size),))


HAND_WRITTEN = {
    "mlp": lambda: (deep_mlp(), (torch.rand(5, 4),)),
    "out of order": lambda: (OutOfOrder(), (torch.rand(5, 4),)),
    "dict in, dict out": lambda: (DictInDictOut(), ({"image": images(8), "number": torch.rand(2, 4)},)),
    "tokens": lambda: (Tokens(), (ids(3, 6),)),
    "nn.TransformerEncoder": lambda: (Encoder(), (ids(3, 6),)),
    "nn.Transformer": lambda: (Translator(), (ids(3, 6), ids(3, 4))),
    "U-Net": lambda: (UNet(), (images(16),)),
    "checkpointed": lambda: (Checkpointed(use_reentrant=False), (torch.rand(5, 4),)),
    "recurrent": lambda: (Recurrent(), (ids(3, 6),)),
    "large head": lambda: (LargeHead(), (images(16),)),
    "used twice": lambda: (UsedTwice(), (torch.rand(5, 4),)),
    "siamese": lambda: (Siamese(Wrapped(deep_mlp(), "net")), (torch.rand(5, 4), torch.rand(5, 4))),
    "in each position": lambda: (InEachPosition(), (torch.rand(5, 3, 4),)),
    "shared embedding": lambda: (SharedEmbedding(), (ids(3, 6),)),
    "alternating": lambda: (Alternating(), (torch.rand(5, 4),)),
    "user-frozen front": lambda: (frozen_front(), (torch.rand(5, 4),)),
    "parametrized": lambda: (parametrized(), (torch.rand(5, 4),)),
    "wrapped": lambda: (Wrapped(Wrapped(deep_mlp(), "backbone"), "anything"), (torch.rand(5, 4),)),
}
FROM_LIBRARIES = {
    "resnet18": vision("resnet18"),
    "vit": lambda: (
        torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 64, dropout=0.1, num_classes=5),
        (images(32),),
    ),
    "densenet121": vision("densenet121"),
    "deeplabv3_mobilenet_v3_large": vision("deeplabv3_mobilenet_v3_large", weights_backbone=None),
    "mobilenet_v2": vision("mobilenet_v2"),
    "googlenet": vision("googlenet", aux_logits=False, init_weights=False),
    "swin_t": lambda: (
        torchvision.models.SwinTransformer([4, 4], 12, [2, 2], [2, 2], [4, 4], num_classes=5),
        (images(32),),
    ),
    "timm convnext": from_timm("convnext_atto"),
    "timm vit": from_timm("vit_tiny_patch16_224", img_size=32, depth=4),
    "timm mixer": from_timm("mixer_s32_224", 64, img_size=64),
    "timm efficientnet": from_timm("efficientnet_lite0"),
    "timm levit": from_timm("levit_128s", 224),
    "timm dla": from_timm("dla46_c"),
    "timm hrnet": from_timm("hrnet_w18_small"),
    "timm mobilevit": from_timm("mobilevit_xxs", 64),
    "timm repvgg": from_timm("repvgg_a0"),
    "timm xcit": from_timm("xcit_nano_12_p16_224", img_size=32),
}
# How many layer modules the chain has: a change of the rules that find them should not go unseen.
LENGTHS = {
    "mlp": 3,
    "out of order": 3,
    "dict in, dict out": 4,
    "tokens": 4,
    "nn.TransformerEncoder": 4,
    "nn.Transformer": 6,
    "U-Net": 5,
    "checkpointed": 4,
    "recurrent": 3,
    "large head": 3,
    "used twice": 3,
    "siamese": 4,
    "in each position": 4,
    "shared embedding": 4,
    "alternating": 3,
    "user-frozen front": 3,
    "parametrized": 3,
    "wrapped": 3,
    "resnet18": 9,
    "vit": 4,
    "densenet121": 62,
    "deeplabv3_mobilenet_v3_large": 24,
    "mobilenet_v2": 19,
    "googlenet": 12,
    "swin_t": 6,
    "timm convnext": 7,
    "timm vit": 5,
    "timm mixer": 9,
    "timm efficientnet": 18,
    "timm levit": 12,
    "timm dla": 10,
    "timm hrnet": 18,
    "timm mobilevit": 12,
    "timm repvgg": 22,
    "timm xcit": 16,
}
MODELS = HAND_WRITTEN | FROM_LIBRARIES
EVERY_GRADIENT = [*HAND_WRITTEN, "resnet18", "vit", "swin_t", "timm vit"]


def loss_of(output):
    return sum(leaf.float().square().mean() for leaf in tensor_leaves(output) if leaf.is_floating_point())


def step(net, inputs):
    torch.manual_seed(1)
    return loss_of(net(*inputs))


def traced(name):
    torch.manual_seed(0)
    net, inputs = MODELS[name]()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    chain = LayerChain.trace(net, lambda: step(net, inputs))
    # The running statistics that one traced step moves are those of that step.
    net.load_state_dict(before)
    return net, inputs, chain


def depths_of(chain, deepest):
    """All depths up to the deepest; of long chains some, for each takes a step."""
    return sorted({*range(1, deepest + 1, 1 + len(chain) // 8), deepest})


def outputs_of(net, paths, run):
    """Every tensor that these modules gave while ``run()``; seen by hooks, which the package does not use."""
    seen = {path: [] for path in paths}
    modules = dict(net.named_modules())
    handles = [
        modules[path].register_forward_hook(lambda _, __, out, path=path: seen[path].append(list(tensor_leaves(out))))
        for path in seen
    ]
    result = run()
    for handle in handles:
        handle.remove()
    return seen, result


def gradients(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def trainable(net):
    return {name for name, p in net.named_parameters() if p.requires_grad}


def assert_same_gradients(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        if expected[name] is None:
            assert gradient is None, name
        else:
            assert gradient is not None, name
            assert torch.equal(gradient, expected[name]), name


def leaves_of(loss):
    """Leaves that a backward of ``loss`` would reach."""
    nodes, queue, leaves = set(), [loss.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        leaves.update([node.variable] if hasattr(node, "variable") else [])
        queue.extend(upstream for upstream, _ in node.next_functions)
    return leaves, len(nodes)


def prefixes_by_autograd(net, inputs, chain, depths):
    """For each depth, the parameters that a boundary activation up to there has a gradient for; then all that train."""
    boundaries = [layer_module.boundary for layer_module in chain.layer_modules]
    seen, loss = outputs_of(net, boundaries, lambda: step(net, inputs))
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}

    def reached(value):
        made = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
        return {name for name, gradient in zip(named, made, strict=True) if gradient is not None}

    sums = []
    for layer_module in chain.layer_modules:
        calls = seen[layer_module.boundary]
        assert all(outputs[layer_module.output_leaf].requires_grad for outputs in calls)
        sums.append(sum(leaf.sum() for outputs in calls for leaf in outputs if leaf.requires_grad))
    return {depth: reached(sum(sums[:depth])) for depth in depths}, reached(loss)


def attributes(module):
    """What hangs on each part of a module; `assert_same_attributes` compares by identity."""
    return [dict(vars(part)) for part in module.modules()]


def assert_same_attributes(before, module):
    for old, part in zip(before, module.modules(), strict=True):
        assert list(old) == list(vars(part))
        assert all(old[key] is value for key, value in vars(part).items())
