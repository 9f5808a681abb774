"""What belongs to a layer module: what its boundary follows from, and no others that ran before it."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.limits import find_chain
from lightning_egeria.core.network.tracing import StepTrace
from lightning_egeria.errors import TooFewLayersError


class Called(nn.ModuleDict):
    """Layers that ``call`` runs."""

    def __init__(self, layers, call):
        super().__init__(layers)
        self.call = call

    def forward(self, x):
        return self.call(self, x)


class TestWhatFreezesTogether:
    """The modules that a boundary follows from, and no others that ran before it."""

    def members(self, net, step, depth, **named):
        chain = LayerChain.trace(net, step, **named)
        assert chain.members(depth) == [path for one in chain.layer_modules[:depth] for path in one.members]
        return chain.members(depth), [path for one in chain.layer_modules[:depth] for path in one.units]

    def test_a_branch_that_joins_later(self):
        net = nn.ModuleDict({"table": nn.BatchNorm1d(4), "a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        net.update({"joined": nn.Linear(8, 4), "head": nn.Linear(4, 2)})

        def step():
            beside = net["table"](torch.randn(3, 4))
            x = net["b"](net["a"](torch.randn(3, 4)).tanh()).tanh()
            return net["head"](net["joined"](torch.cat([x, beside], 1))).sum()

        assert self.members(net, step, 2) == (["a", "b"], ["a", "b"])
        members, units = self.members(net, step, 3)
        assert members == ["a", "b", "table", "joined"]
        assert units == ["a", "b", "table", "joined"]

    def test_a_teacher_without_gradients(self):
        net = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for name in ("teacher", "a", "b")})
        net["head"] = nn.Linear(4, 4)

        def step():
            x = torch.randn(3, 4)
            with torch.no_grad():
                wanted = net["teacher"](x)
            return (net["head"](net["b"](net["a"](x))) - wanted).square().sum()

        assert self.members(net, step, 2)[0] == ["a.0", "a.1", "a", "b.0", "b.1"]

    def test_layers_that_the_user_has_frozen_in_front(self):
        """They make up the layer module that reads them last, through views and modules in place."""
        net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("stem", "body", "aside", "first", "late", "head")})
        net["act"] = nn.ReLU(inplace=True)
        for name in ("stem", "body", "aside"):
            net[name].requires_grad_(False)

        def step(reads_aside):
            stem = net["act"](net["stem"](torch.randn(3, 4)))
            x = net["late"](net["first"](net["body"](stem.view(3, 4)).flatten(1)).relu())
            return net["head"](x + net["aside"](stem) if reads_aside else x).sum()

        assert self.members(net, lambda: step(True), 1)[1] == ["body", "first"]
        assert self.members(net, lambda: step(False), 1)[1] == ["stem", "body", "first"]

    def test_parts_of_a_frozen_layer_come_with_it(self):
        backbone = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten()))
        net = nn.Sequential(
            backbone.requires_grad_(False), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2)
        )
        assert self.members(net, lambda: net(torch.randn(3, 1, 6, 6)).sum(), 1)[1] == ["0", "1", "2"]

    def test_heads_beside_named_layers(self):
        net = nn.ModuleDict({f"{part}{at}": nn.Linear(4, 4) for at in range(4) for part in ("layer", "head")})

        def step():
            x, loss = torch.randn(3, 4), 0
            for at in range(4):
                x = net[f"layer{at}"](x).tanh()
                loss = loss + net[f"head{at}"](x).square().sum()
            return loss

        names = [f"layer{at}" for at in range(4)]
        assert self.members(net, step, 3, layer_modules=names) == (names[:3], names[:3])

    def test_layers_that_the_user_has_frozen(self):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
        net.append(nn.Linear(4, 4))
        net[:3].requires_grad_(False)
        net = nn.ModuleDict({"stem": net[0], "norm": net[1], "act": net[2], "a": net[3], "b": net[4], "head": net[5]})

        def step():
            x = torch.randn(3, 4)
            for name in ("stem", "norm", "act", "a", "b", "head"):
                x = net[name](x)
            return x.sum()

        assert self.members(net, step, 1)[0] == ["stem", "norm", "a"]

    def test_a_function_behind_layers_without_gradients(self):
        """What nobody can tell to be in front stays as the user has it, here in training mode."""

        def call(net, x):
            return net["head"](net["b"](net["a"](net["norm"](net["stem"](x)).relu())))

        net = Called({name: nn.Linear(4, 4) for name in ("stem", "a", "b", "head")} | {"norm": nn.BatchNorm1d(4)}, call)
        net["stem"].requires_grad_(False)
        net["norm"].requires_grad_(False)
        assert self.members(net, lambda: net(torch.randn(3, 4)).sum(), 1)[0] == ["a"]

    def test_parameters_that_no_step_uses(self):
        class Masked(nn.Module):
            """A token that is not used, and a layer that another step may use."""

            def __init__(self):
                super().__init__()
                self.layer, self.token, self.other = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

            def forward(self, x):
                return self.layer(x).tanh()

        net = nn.Sequential(Masked(), Masked(), nn.Linear(4, 4))
        chain = LayerChain.trace(net, lambda: net(torch.randn(3, 4)).sum())
        assert chain.layer_modules[0].parameters == ("0.layer.weight", "0.layer.bias", "0.token")

    def test_evaluation_of_attention_has_its_kernel(self):
        """The trace leaves it alone: a teacher gives the same bits in the first step as in all others."""

        def call(net, x):
            with torch.no_grad():
                outputs.append(net["teacher"](x))
            return net["c"](net["b"](net["a"](x)))

        outputs, x = [], torch.randn(2, 5, 8)
        layers = {name: nn.Linear(8, 8) for name in "abc"}
        net = Called(layers | {"teacher": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()}, call)
        net(x)
        LayerChain.trace(net, lambda: net(x).sum())
        assert torch.equal(*outputs)


def test_named_layers_of_a_network_that_is_toggled_off():
    """As the discriminator, where the generator trains first."""
    net = nn.ModuleDict({name: nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))) for name in ("G", "D")})
    optimizers = [torch.optim.SGD(net[name].parameters(), 0.1) for name in ("G", "D")]
    names = ["D.0", "D.1", "D.2"]

    def traced():
        trace = StepTrace(net)
        trace.start()
        loss = net["D"](net["G"](torch.randn(3, 4))).sum()
        trace.stop()
        return find_chain(trace, loss, optimizers, names)

    net["D"].requires_grad_(False)
    with pytest.raises(TooFewLayersError, match=r"'D\.0' does not train in the first backward pass"):
        traced()
    net["D"][1:].requires_grad_(True)  # the user's own choice of layers
    assert traced().names == ("D.0", "D.1", "D.2")
