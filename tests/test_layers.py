"""Layer chains of many models; what a frozen prefix does, held against autograd itself and hand-written freezing."""

import copy
import json
import pickle
import types

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_egeria.errors import CheckpointError, LayerChainError
from lightning_egeria.layers import SETTLING_STEPS, FrozenPrefix, LayerChain
from lightning_egeria.tracing import tensor_leaves


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny layers gain nothing from threads, and lose much when other programs want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Models written by hand, each with something that a chain could stumble over.


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


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(x))))
        return self.head(F.relu(self.d(F.relu(self.b(F.relu(self.c(x)))))))


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
    "used twice": 2,
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
        outputs = seen[layer_module.boundary][-1]
        assert outputs[layer_module.output_leaf].requires_grad
        sums.append(sum(leaf.sum() for leaf in outputs if leaf.requires_grad))
    return {depth: reached(sum(sums[:depth])) for depth in depths}, reached(loss)


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_agrees_with_autograd(name):
    net, inputs, chain = traced(name)
    assert len(chain) == LENGTHS[name]
    assert chain.max_depth == len(chain) - 1
    assert len(set(chain.names)) == len(chain)
    # One backward per depth: a few of them do for the long chains.
    depths = sorted({*range(1, len(chain) + 1, 1 + len(chain) // 8), len(chain)})
    prefixes, used = prefixes_by_autograd(net, inputs, chain, depths)
    for depth, expected in prefixes.items():
        parameters = chain.prefix_parameters(depth)
        assert len(set(parameters)) == len(parameters)
        assert set(parameters) == expected, f"depth {depth}"
    assert all(layer_module.parameters for layer_module in chain.layer_modules)
    assert prefixes[len(chain)] < used, "the head must be left"


@pytest.mark.parametrize("name", MODELS)
def test_no_backward_work_is_left_for_a_frozen_prefix(name):
    net, inputs, chain = traced(name)
    prefix = FrozenPrefix(net, chain)
    named = dict(net.named_parameters())
    leaves, size = leaves_of(step(net, inputs))
    for depth in range(1, chain.max_depth + 1):
        prefix.set_depth(depth)
        boundaries = [layer_module.boundary for layer_module in chain.layer_modules[:depth]]
        seen, loss = outputs_of(net, boundaries, lambda: step(net, inputs))
        for boundary, calls in seen.items():
            assert calls
            for leaf in calls[-1]:
                assert leaf.grad_fn is None, f"{boundary} at depth {depth}"
                assert not leaf.requires_grad, f"{boundary} at depth {depth}"
        frozen = {named[parameter] for parameter in chain.prefix_parameters(depth)}
        active, smaller = leaves_of(loss)
        assert active == leaves - frozen, f"depth {depth}"
        assert smaller < size, f"depth {depth}"
        size = smaller


@pytest.mark.parametrize("name", EVERY_GRADIENT)
def test_gradients_are_those_of_hand_written_freezing_at_every_depth(name):
    net, inputs, chain = traced(name)
    prefixes, _ = prefixes_by_autograd(net, inputs, chain, range(1, len(chain)))
    users = {parameter for parameter, p in net.named_parameters() if not p.requires_grad}
    before = {key: value.clone() for key, value in net.state_dict().items()}
    prefix = FrozenPrefix(net, chain)
    for depth in [*range(chain.max_depth + 1), 0]:
        net.load_state_dict(before)
        net.zero_grad()
        prefix.set_depth(depth)
        by_hand = copy.deepcopy(net)
        for parameter in by_hand.parameters():
            parameter.requires_grad_(True)
        step(net, inputs).backward()
        frozen = prefixes.get(depth, set())
        for parameter_name, parameter in by_hand.named_parameters():
            parameter.requires_grad_(parameter_name not in frozen | users)
        step(by_hand, inputs).backward()
        assert_same_gradients(gradients(net), gradients(by_hand))
        assert all(net.get_parameter(parameter).grad is None for parameter in frozen)
        for (key, value), other in zip(net.state_dict().items(), by_hand.state_dict().values(), strict=True):
            assert torch.equal(value, other), key


@pytest.mark.parametrize("name", [*EVERY_GRADIENT, "densenet121", "mobilenet_v2", "timm levit"])
def test_unfreezing_gives_back_what_was_there(name):
    net, inputs, chain = traced(name)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modes = {path: module.training for path, module in net.named_modules()}
    grads = trainable(net)
    step(net, inputs).backward()
    expected = gradients(net)
    net.load_state_dict(before)
    prefix = FrozenPrefix(net, chain)
    for depth in (1, chain.max_depth, 0):
        prefix.set_depth(depth)
    assert trainable(net) == grads
    assert {path: module.training for path, module in net.named_modules()} == modes
    net.zero_grad()
    step(net, inputs).backward()
    assert_same_gradients(gradients(net), expected)


@pytest.mark.parametrize("name", ["tokens", "resnet18", "timm levit"])
def test_tracing_changes_nothing(name):
    torch.manual_seed(0)
    net, inputs = MODELS[name]()
    before = [dict(vars(part)) for part in net.modules()]
    expected = step(copy.deepcopy(net), inputs)
    losses = []

    def run():
        losses.append(step(net, inputs))
        return losses[-1]

    LayerChain.trace(net, run)
    assert torch.equal(losses[0], expected)
    for old, part in zip(before, net.modules(), strict=True):
        assert list(old) == list(vars(part))
        assert all(old[key] is value for key, value in vars(part).items())


def test_a_step_that_raises_leaves_the_modules_as_they_were():
    net = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LayerChain.trace(net, lambda: step(net, (torch.rand(2, 5),)))
    assert all("forward" not in vars(part) for part in net.modules())


class TestWhatIsFound:
    def chain(self, net, *inputs, **kwargs):
        return LayerChain.trace(net, lambda: step(net, inputs), **kwargs)

    def test_execution_order_not_registration_order(self):
        chain = self.chain(OutOfOrder(), torch.rand(5, 4))
        assert chain.names == ("first", "second", "third")

    def test_normalisation_and_modules_without_parameters_join_the_one_before(self):
        chain = self.chain(deep_mlp(), torch.rand(5, 4))
        assert [(m.name, m.boundary) for m in chain.layer_modules] == [("0", "3"), ("4", "6"), ("7", "8")]
        assert [m.members for m in chain.layer_modules] == [("0", "1", "2", "3"), ("4", "5", "6"), ("7", "8")]

    def test_stem_of_a_resnet(self):
        chain = traced("resnet18")[2]
        assert (chain.layer_modules[0].name, chain.layer_modules[0].boundary) == ("conv1", "maxpool")
        assert chain.names[1:] == tuple(f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1))

    def test_parameters_that_a_container_owns(self):
        chain = self.chain(Tokens(), ids(3, 6))
        assert chain.names == ("embedding", "blocks.0", "blocks.1", "blocks.2")
        assert chain.prefix_parameters(1) == ("embedding.weight",)
        assert {"pos_embed", "cls_token"} <= set(chain.layer_modules[1].parameters)

    @pytest.mark.parametrize("attribute", ["model", "net", "_backbone", "students"])
    def test_any_attribute_name_and_any_number_of_wrappers(self, attribute):
        net = deep_mlp()
        for _ in range(3):
            net = Wrapped(net, attribute)
        chain = self.chain(net, torch.rand(5, 4))
        assert chain.names == tuple(f"{attribute}.{attribute}.{attribute}.{name}" for name in "047")
        assert chain.entries == ("",)

    def test_a_step_that_calls_the_network_itself(self):
        net = Wrapped(deep_mlp(), "net")
        chain = LayerChain.trace(net, lambda: step(net.net, (torch.rand(5, 4),)))
        assert chain.names == ("net.0", "net.4", "net.7")
        assert chain.entries == ("net",)

    def test_two_networks_one_behind_the_other(self):
        net = nn.ModuleDict({"decoder": deep_mlp(), "encoder": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))})
        chain = LayerChain.trace(net, lambda: loss_of(net["decoder"](net["encoder"](torch.rand(5, 3)))))
        assert chain.names == ("encoder.0", "encoder.1", "decoder.0", "decoder.4", "decoder.7")
        assert chain.entries == ("encoder", "decoder")

    def test_a_wrapper_beside_a_head_with_most_of_the_weights(self):
        assert self.chain(LargeHead(), images(16)).names == ("encoder.one", "encoder.two", "encoder.three")

    def test_tied_embedding_and_head_never_freeze(self):
        chain = self.chain(TiedHead(), ids(3, 6))
        assert chain.max_depth == 0
        (note,) = chain.notes
        assert "'embedding.weight'" in note
        assert "tied" in note
        assert self.chain(TiedHead(tied=False), ids(3, 6)).max_depth == 2

    def test_a_weight_tied_to_the_head_behind_an_untied_front(self):
        class Late(TiedHead):
            def forward(self, ids):
                return F.linear(super().forward(ids), self.b.weight @ self.embedding.weight.T)

        chain = self.chain(Late(tied=False), ids(3, 6))
        assert chain.max_depth == 0
        assert "'embedding.weight'" in chain.notes[0]

    def test_a_module_that_is_used_twice_freezes_with_all_up_to_its_last_use(self):
        chain = self.chain(UsedTwice(), torch.rand(5, 4))
        assert chain.names == ("a", "d")
        assert {"b.weight", "c.weight", "d.weight"} <= set(chain.layer_modules[1].parameters)
        assert chain.notes == ("'b' to 'd' share 'b.weight' and 1 more and freeze together",)

    def test_siamese_use_freezes_nothing_and_says_so(self):
        net = deep_mlp()
        chain = LayerChain.trace(net, lambda: (net(torch.rand(5, 4)) - net(torch.rand(5, 4))).square().sum())
        assert chain.max_depth == 0
        assert "called twice" in chain.notes[0]
        assert len(chain.notes) == 1

    @pytest.mark.parametrize("teacher_first", [True, False])
    @pytest.mark.parametrize("own", [True, False])
    @pytest.mark.parametrize("names", [None, ["student.0", "student.4", "student.7"]])
    def test_a_teacher_under_no_grad_is_not_in_the_chain(self, teacher_first, own, names):
        net = nn.ModuleDict({"teacher": deep_mlp(), "student": deep_mlp()})
        teacher, student = net["student" if own else "teacher"], net["student"]

        def run():
            torch.manual_seed(1)
            x = torch.rand(5, 4)
            if teacher_first:
                with torch.no_grad():
                    target = teacher(x)
                return (student(x) - target).square().mean()
            output = student(x)
            with torch.no_grad():
                target = teacher(x)
            return (output - target).square().mean()

        chain = LayerChain.trace(net, run, names)
        assert chain.names == ("student.0", "student.4", "student.7")
        assert chain.max_depth == 2
        prefix = FrozenPrefix(net, chain)
        prefix.set_depth(2)
        run().backward()
        back = {"7.weight", "7.bias", "9.weight", "9.bias"}
        if names:
            back |= {"5.weight", "5.bias"}  # normalisation behind a named module is not part of it
        assert {name for name, p in net.named_parameters() if p.grad is not None} == {f"student.{n}" for n in back}

    def test_what_the_user_froze_is_no_layer_module(self):
        chain = self.chain(frozen_front(), torch.rand(5, 4))
        assert chain.names == ("0.4", "0.7", "0.9")

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_an_input_that_needs_a_gradient_is_no_weight(self, requires_grad):
        class Skip(nn.Module):
            def __init__(self):
                super().__init__()
                self.net, self.head = deep_mlp(), nn.Linear(6, 2)

            def forward(self, x):
                return self.head(torch.cat([self.net(x), x], 1))

        chain = self.chain(Skip(), torch.rand(5, 4, requires_grad=requires_grad))
        assert chain.names == ("net.0", "net.4", "net.7", "net.9")
        assert chain.max_depth == 3
        assert chain.notes == ()

    def test_autocast_shares_one_copy_of_a_weight(self):
        net, x = UsedTwice(), torch.rand(5, 4)

        def run():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss_of(net(x))

        chain = LayerChain.trace(net, run)
        plain = self.chain(UsedTwice(), x)
        assert chain.names == plain.names
        assert chain.notes == plain.notes
        assert {m.name: set(m.parameters) for m in chain.layer_modules} == {
            m.name: set(m.parameters) for m in plain.layer_modules
        }
        assert len(set(chain.prefix_parameters(2))) == len(chain.prefix_parameters(2))

    def test_reentrant_checkpointing_is_refused(self):
        with pytest.raises(LayerChainError, match="use_reentrant=False"):
            self.chain(Checkpointed(use_reentrant=True), torch.rand(5, 4))

    def test_submodules_with_two_names(self):
        net = deep_mlp()
        holder = nn.Module()
        # The inside of the first layer module is registered once more, under a name that comes first.
        wrapped = nn.Sequential(nn.Sequential(net[0], net[1]), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))
        holder.alias, holder.net = net[0], wrapped
        chain = LayerChain.trace(holder, lambda: step(wrapped, (torch.rand(5, 4),)))
        prefix = FrozenPrefix(holder, chain)
        prefix.set_depth(2)
        prefix.eval_all()
        assert not any(part.training for part in wrapped[0].modules())
        assert not wrapped[0][0].weight.requires_grad
        prefix.set_depth(0)
        named = LayerChain.trace(holder, lambda: step(wrapped, (torch.rand(5, 4),)), ["net.0.0", "net.1", "net.2"])
        assert named.names == ("alias", "net.1", "net.2")


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.text = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.cat([self.image(x), self.text(x)], 1))


class TestWhatIsUsedBehind:
    """Something else than its last output may leave a prefix."""

    @pytest.mark.parametrize("low_precision", [False, True])
    def test_in_a_chain_only_the_next_uses_what_one_computes(self, low_precision):
        net = timm.create_model("resnet18", num_classes=3)

        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
                return net(torch.randn(2, 3, 32, 32)).sum()

        chain = LayerChain.trace(net, step)
        assert [one.last_use for one in chain.layer_modules] == list(range(1, len(chain) + 1))
        values = tuple(float(value) for value in torch.rand(len(chain)))
        assert chain.of_prefixes(values, 0) == values

    def test_two_towers(self):
        net = Towers()
        chain = LayerChain.trace(net, lambda: net(torch.randn(3, 4)).sum())
        assert chain.names == ("image.0", "image.2", "text.0", "text.2")
        assert [one.last_use for one in chain.layer_modules] == [1, 4, 3, 4]
        assert chain.of_prefixes([9.0, 5.0, 2.0, 7.0], 0) == (9.0, 5.0, 5.0, 7.0)
        # What is frozen does not move.
        assert chain.of_prefixes([float("nan"), float("nan"), 2.0, 7.0], 2)[2:] == (2.0, 7.0)

    def test_skip_connections(self):
        net = UNet()
        chain = LayerChain.trace(net, lambda: net(images(16)).sum())
        last = {one.name: one.last_use for one in chain.layer_modules}
        assert last == {"down1": 4, "down2": 3, "middle": 3, "up2": 4, "up1": 5}

    def test_an_encoder_that_every_layer_of_the_decoder_looks_at(self):
        net = nn.Transformer(8, 2, 2, 3, 16, batch_first=True)
        chain = LayerChain.trace(net, lambda: net(torch.randn(2, 5, 8), torch.randn(2, 4, 8)).sum())
        assert [one.last_use for one in chain.layer_modules] == [1, 4, 3, 4]
        assert chain.of_prefixes([9.0, 5.0, 2.0, 7.0], 0) == (9.0, 5.0, 5.0, 7.0)

    def test_a_second_head_counts_to_the_end(self):
        net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("first", "aside", "second", "third", "head")})

        def step():
            x = net["first"](torch.randn(2, 4)).tanh()
            beside = net["aside"](x)
            return net["head"](net["third"](net["second"](x).tanh()).tanh()).sum() + beside.sum()

        chain = LayerChain.trace(net, step)
        assert dict(zip(chain.names, (one.last_use for one in chain.layer_modules), strict=True)) == {
            "first": 2,
            "aside": 4,
            "second": 3,
            "third": 4,
        }


class TestNamed:
    def chain(self, names, net=None):
        net = net or vision("resnet18")()[0]
        return LayerChain.trace(net, lambda: step(net, (images(32),)), names)

    def test_taken_as_they_are(self):
        net = vision("resnet18")()[0]
        chain = self.chain(["maxpool", "layer1", "layer2", "layer3"], net)
        assert chain.names == ("maxpool", "layer1", "layer2", "layer3")
        assert chain.max_depth == 3
        assert {name.split(".")[0] for name in chain.prefix_parameters(2)} == {"conv1", "bn1", "layer1"}
        prefix = FrozenPrefix(net, chain)
        prefix.set_depth(2)
        prefix.eval_all()
        assert {path.split(".")[0] for path, part in net.named_modules() if not part.training} == {
            "conv1",
            "bn1",
            "relu",
            "maxpool",
            "layer1",
        }

    @pytest.mark.parametrize(
        ("name", "near"), [("layer5", "layer4"), ("layr1.0", "layer1.0"), ("conv_1", "conv1"), ("0.conv2", "0.conv2")]
    )
    def test_an_unknown_name_is_answered_with_near_ones(self, name, near):
        with pytest.raises(LayerChainError, match=f"layer_modules: there is no module '{name}'.*{near}'"):
            self.chain(["conv1", name])

    def test_a_name_unlike_any_is_answered_with_the_first_ones(self):
        with pytest.raises(LayerChainError, match=r"no module 'zzzz'.*'conv1'"):
            self.chain(["conv1", "zzzz"])

    def test_a_module_that_was_not_called(self):
        net = Wrapped(deep_mlp(), "net")
        with pytest.raises(LayerChainError, match="'unused' was not called"):
            LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),)), ["net.0", "unused"])

    @pytest.mark.parametrize("names", [["layer2", "layer1"], ["layer1", "layer1", "layer2"]])
    def test_wrong_order_is_answered_with_the_right_one(self, names):
        with pytest.raises(LayerChainError, match=r"execution order .*\['layer1', 'layer2'\], got"):
            self.chain(names)

    @pytest.mark.parametrize("names", [[], ["layer1"]])
    def test_fewer_than_two(self, names):
        with pytest.raises(LayerChainError, match=r"at least two layer modules .*ResNet"):
            self.chain(names)


class TestTooSmall:
    @pytest.mark.parametrize("layers", [1, 2])
    def test_fewer_than_two_layer_modules(self, layers):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        with pytest.raises(LayerChainError, match=r"at least two layer modules are needed, found .* in Sequential"):
            LayerChain.trace(net, lambda: net(torch.rand(2, 4)).sum())

    def test_nothing_trains(self):
        net = mlp().requires_grad_(False)
        with pytest.raises(LayerChainError, match="no trainable parameter"):
            LayerChain.trace(net, lambda: net(torch.rand(2, 4)).sum())

    def test_the_loss_has_nothing_to_do_with_the_network(self):
        net, other = mlp(), nn.Parameter(torch.ones(1))
        with pytest.raises(LayerChainError, match="found none"):
            LayerChain.trace(net, lambda: (net(torch.rand(2, 4)).detach().sum() * other).sum())


@pytest.mark.parametrize("name", ["used twice", "resnet18", "nn.Transformer"])
def test_chain_state_round_trip(name):
    chain = traced(name)[2]
    assert LayerChain.from_state(json.loads(json.dumps(chain.to_state()))) == chain


class TestFrozenPrefix:
    @pytest.fixture
    def net(self):
        return deep_mlp()

    @pytest.fixture
    def prefix(self, net):
        return FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))

    def train(self, net, optimizer, steps=3):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(net(torch.rand(5, 4))).backward()
            optimizer.step()

    def test_starts_with_nothing_frozen(self, net, prefix):
        assert (prefix.depth, prefix.version) == (0, 0)
        assert all(parameter.requires_grad for parameter in net.parameters())

    @pytest.mark.parametrize("depth", [-1, 3, 100])
    def test_depth_out_of_range(self, net, prefix, depth):
        with pytest.raises(ValueError, match=rf"depth must be in 0\.\.2, got {depth}"):
            prefix.set_depth(depth)
        assert (prefix.depth, prefix.version) == (0, 0)
        assert all(parameter.requires_grad for parameter in net.parameters())

    def test_the_version_rises_with_each_change_and_only_then(self, prefix):
        versions = []
        for depth in (0, 1, 1, 2, 1, 0, 0, 2):
            prefix.set_depth(depth)
            versions.append(prefix.version)
        assert versions == [0, 1, 1, 2, 3, 4, 4, 5]

    def test_listeners_hear_of_each_change_when_it_is_done(self, net, prefix):
        heard = []

        class Listener:
            def prefix_changed(self, prefix):
                heard.append((prefix.depth, prefix.version, net[0].weight.requires_grad, net[1].training))

        prefix.listeners.extend([Listener(), Listener()])
        for depth in (1, 1, 2, 0):
            prefix.set_depth(depth)
        assert heard[::2] == heard[1::2] == [(1, 1, False, False), (2, 2, False, False), (0, 3, True, True)]

    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
        ],
        ids=["sgd", "sgd foreach", "adam", "adamw", "rmsprop"],
    )
    def test_an_optimizer_with_momentum_and_decay_leaves_the_prefix_alone(self, net, prefix, make):
        optimizer = make(net.parameters())
        self.train(net, optimizer)
        prefix.set_depth(2)
        frozen = {name: net.get_parameter(name) for name in prefix.chain.prefix_parameters(2)}
        before = {key: value.clone() for key, value in net.state_dict().items()}
        state = copy.deepcopy({name: optimizer.state[p] for name, p in frozen.items()})
        self.train(net, optimizer)
        after = {key: value.clone() for key, value in net.state_dict().items()}
        for key in before:
            same = torch.equal(before[key], after[key])
            assert same == (key.split(".")[0] in "01245"), key
        for name, p in frozen.items():
            assert p.grad is None
            for key, value in state[name].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][key])), (name, key)
        prefix.set_depth(0)
        self.train(net, optimizer)
        assert not any(torch.equal(after[name], p) for name, p in frozen.items())

    def test_gradients_that_are_there_are_dropped_for_the_prefix_only(self, net, prefix):
        loss_of(net(torch.rand(5, 4))).backward()
        prefix.set_depth(1)
        assert {name for name, p in net.named_parameters() if p.grad is None} == set(prefix.chain.prefix_parameters(1))

    def test_batch_norm_of_the_prefix_stands_still_and_the_other_moves(self, net, prefix):
        prefix.set_depth(1)
        before = {key: value.clone() for key, value in net.named_buffers()}
        loss_of(net(torch.rand(5, 4)))
        moved = {key for key, value in net.named_buffers() if not torch.equal(value, before[key])}
        assert moved == {"5.running_mean", "5.running_var", "5.num_batches_tracked"}

    @pytest.mark.parametrize(
        ("evaluates", "modes"), [(True, [False] * 4 + [True] * 6), (False, [True, False] + [True] * 8)]
    )
    def test_somebody_who_calls_train_does_not_reach_the_prefix(self, net, prefix, evaluates, modes):
        prefix.set_depth(1)
        if evaluates:
            prefix.eval_all()
        assert net.train() is net
        assert net[1].train() is net[1]
        assert [part.training for part in net] == modes
        other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
        prefix.set_depth(0)
        assert all(part.training for part in net)
        assert not any("train" in vars(part) for part in net)
        assert [part.training for part in other] == modes
        assert all(part.training for part in other.train())

    def test_modes_come_back_after_somebody_changed_them_past_train(self, net, prefix):
        prefix.set_depth(1)
        net[1].training = True
        prefix.assert_modes()
        assert [part.training for part in net] == [True, False] + [True] * 8
        prefix.set_depth(0)
        assert all(part.training for part in net)

    def test_the_prefix_gives_the_same_output_every_time_if_it_is_to(self, net, prefix):
        prefix.set_depth(1)
        x = torch.rand(5, 4)
        assert not torch.equal(net[:7](x), net[:7](x))
        prefix.eval_all()
        prefix.set_depth(2)
        assert torch.equal(net[:7](x), net[:7](x))

    def test_what_changes_in_training_is_at_rest_and_dropout_goes_on(self):
        class Counts(nn.Module):
            """Changes what a part of it holds."""

            def __init__(self):
                super().__init__()
                self.part, self.dropout = nn.BatchNorm1d(4, momentum=0.0), nn.Dropout(0.5)

            def forward(self, x):
                if self.training:
                    self.part.running_mean += 1
                return self.dropout(x)

        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        net = nn.Sequential(spectral, Counts(), nn.LSTM(4, 4, 2, dropout=0.5), nn.Identity(), *deep_mlp()[:4])
        net[3].forward = lambda output: output[0]
        net = nn.Sequential(*net, nn.Linear(6, 6), nn.Linear(6, 2))
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(prefix.chain.max_depth)
        before = copy.deepcopy(net.state_dict())
        outputs = [net[:8](torch.ones(5, 4)) for _ in range(2)]
        assert not torch.equal(*outputs)
        assert all(map(torch.equal, before.values(), net.state_dict().values()))
        learning = {path for path, part in net.named_modules() if part.training and "." not in path}
        assert learning >= {"", "2", "3", "4", "6", "7"}
        assert net[1].dropout.training

    @staticmethod
    def one_step(prefix, forward=lambda: None):
        prefix.begin_batch()
        forward()
        prefix.end_batch()
        settled = prefix.count_step()
        if settled:
            prefix.settle()
        return settled

    @pytest.mark.parametrize("momentum", [0.01, None])
    def test_slow_statistics_settle_before_they_are_at_rest(self, net, momentum):
        net[1].momentum = momentum
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        versions = []
        prefix.listeners.append(types.SimpleNamespace(prefix_changed=lambda prefix: versions.append(prefix.version)))
        prefix.set_depth(1)
        generator = torch.Generator().manual_seed(0)

        def forward():
            assert net[1].momentum == 0.1
            net[:2](3 + torch.rand(50, 4, generator=generator))

        for number in range(SETTLING_STEPS):
            net.train()
            assert (prefix.depth, prefix.settled_depth, net[1].training, net[1].momentum) == (1, 0, True, momentum)
            assert self.one_step(prefix, forward) == (number == SETTLING_STEPS - 1)
        assert (prefix.settled_depth, net[1].training, net[1].momentum, versions) == (1, False, momentum, [1, 2])
        expected = net[0](3 + torch.rand(5000, 4, generator=generator)).mean(0)
        torch.testing.assert_close(net[1].running_mean, expected.detach(), rtol=0.05, atol=0.05)
        assert not self.one_step(prefix)
        prefix.set_depth(0)
        assert (prefix.settled_depth, net[1].training, net[1].momentum) == (0, True, momentum)

    def test_each_module_settles_in_its_own_time(self, net):
        net[1].momentum = net[5].momentum = 0.01
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        for _ in range(SETTLING_STEPS - 10):
            self.one_step(prefix)
        prefix.set_depth(2)
        assert [self.one_step(prefix) for _ in range(10)] == [False] * 9 + [True]
        assert (prefix.settled_depth, net[1].training, net[5].training) == (1, False, True)
        assert [self.one_step(prefix) for _ in range(30)] == [False] * 29 + [True]
        assert (prefix.settled_depth, net[5].training) == (2, False)

    def test_what_is_shallower_stays_settled(self, net):
        net[5].momentum = 0.01
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(2)
        assert (prefix.settled_depth, net[1].training, net[5].training) == (1, False, True)
        prefix.begin_batch()
        prefix.set_depth(1)  # an error in the middle of a step, say
        assert (prefix.settled_depth, net[1].training, net[5].training, net[5].momentum) == (1, False, True, 0.01)

    def test_a_momentum_that_the_user_sets_meanwhile_counts(self, net):
        net[1].momentum = 0.05
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        self.one_step(prefix)
        net[1].momentum = 0.005
        self.one_step(prefix, lambda: setattr(net[1], "momentum", 0.004))
        assert net[1].momentum == 0.004
        prefix.set_depth(0)
        assert net[1].momentum == 0.004

    @pytest.mark.parametrize("momentum", [0.1, 0.5, 0.0])
    def test_other_statistics_are_at_rest_at_once(self, net, momentum):
        net[1].momentum = momentum
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        assert (prefix.settled_depth, net[1].training, net[1].momentum) == (1, False, momentum)

    def test_settling_goes_on_from_a_checkpoint(self, net):
        net[1].momentum = net[5].momentum = 0.01
        chain = LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),)))
        other = copy.deepcopy(net)
        prefix, resumed = FrozenPrefix(net, chain), FrozenPrefix(other, chain)
        for depth in (1, 2):
            prefix.set_depth(depth)
            for _ in range(SETTLING_STEPS - 10 * (depth == 2)):
                self.one_step(prefix)
        resumed.load_state_dict(json.loads(json.dumps(prefix.state_dict())))
        for _ in range(9):
            assert not self.one_step(resumed)
            assert (resumed.depth, resumed.settled_depth, other[1].training, other[5].training) == (2, 1, False, True)
        assert self.one_step(resumed)
        assert (resumed.settled_depth, other[5].training, other[5].momentum) == (2, False, 0.01)

    def test_what_the_user_froze_stays_frozen(self, net):
        net[1].bias.requires_grad_(False)
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        net[0].bias.requires_grad_(False)  # after the trace
        for depth in (1, 2, 0):
            prefix.set_depth(depth)
        assert {name for name, p in net.named_parameters() if not p.requires_grad} == {"0.bias", "1.bias"}

    def test_what_the_user_put_in_evaluation_mode_stays_there(self, net, prefix):
        net[1].eval()
        for depth in (1, 2):
            prefix.set_depth(depth)
            prefix.assert_modes()
        prefix.set_depth(0)
        assert [index for index, part in enumerate(net) if not part.training] == [1]

    def test_the_container_and_the_back_keep_training(self, net, prefix):
        prefix.eval_all()
        prefix.set_depth(2)
        assert net.training
        assert [part.training for part in net] == [False] * 7 + [True] * 3

    def test_a_part_that_is_shared_with_the_back_keeps_training(self):
        net = OutOfOrder()
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (torch.rand(5, 4),))))
        prefix.set_depth(1)
        assert not net.norm.training
        assert net.drop.training
        assert net.act.training

    def test_padded_batches_through_a_partly_frozen_transformer_encoder(self):
        net = Encoder()
        x = ids(3, 6)
        prefix = FrozenPrefix(net, LayerChain.trace(net, lambda: step(net, (x,))))
        prefix.set_depth(2)
        parts = dict(net.encoder.layers[0].named_modules())
        assert all(part.training for part in parts.values())
        prefix.eval_all()
        assert not any(parts[name].training for name in ("self_attn", "dropout", "dropout1", "dropout2"))
        step(net, (x,)).backward()
        assert net.encoder.layers[0].linear1.weight.grad is None
        assert net.encoder.layers[1].linear1.weight.grad is not None

    def test_depth_may_go_up_and_down(self, net, prefix):
        for depth in (2, 1, 2, 0, 1):
            prefix.set_depth(depth)
            frozen = {name for name, p in net.named_parameters() if not p.requires_grad}
            assert frozen == set(prefix.chain.prefix_parameters(depth))

    def test_a_chain_from_a_checkpoint_must_fit(self, net, prefix):
        prefix.check_fits()
        FrozenPrefix(deep_mlp(), prefix.chain).check_fits()
        with pytest.raises(CheckpointError, match=r"does not fit Sequential: it lacks '\S+' and \d+ more"):
            FrozenPrefix(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), prefix.chain).check_fits()
        shorter = nn.Sequential(*deep_mlp()[:8])
        with pytest.raises(CheckpointError, match="lacks '8'"):
            FrozenPrefix(shorter, prefix.chain).check_fits()
