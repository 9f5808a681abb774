"""The int8 network against the float32 network that it was made from."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_egeria.core.network.calls import NetworkCall
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.freezing.int8 import Int8Layers
from lightning_egeria.freezing.reference import EvaluationRequest, ReferenceModel


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, dilation=2, bias=False),
        nn.Conv2d(8, 8, 3, padding="same"),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.positive, self.negative = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.positive(x) if x.sum().item() > 0 else self.negative(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        states, (hidden, _) = self.lstm(x)
        return states, self.out(hidden[0])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.second(Doubled.apply(self.first(x)))


@dataclasses.dataclass
class Output:
    last: torch.Tensor


class Dictionaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, batch, mode="mean", scale=1):
        hidden = F.gelu(self.layer(input=self.words(batch["ids"]))) * scale
        return {"name": mode, "output": Output(getattr(hidden, mode)(1))}


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def numbers(*shape):
    return (torch.randn(*shape),), {}


CASES = {
    "convolutions": (convolutions, [("2", 0), ("3", 0), ("", 0)], lambda n: numbers(n, 3, 14, 14)),
    "branch": (Branching, [("", 0)], lambda n: numbers(n, 6)),
    "lstm": (Recurrent, [("lstm", 0), ("lstm", 1), ("", 1)], lambda n: numbers(1, n, 6)),
    "custom function and parametrization": (Custom, [("first", 0), ("second", 0)], lambda n: numbers(n, 6)),
    "mappings and other arguments": (
        Dictionaries,
        [("layer", 0), ("", 0)],
        lambda n: (({"ids": torch.randint(10, (n, 4))}, "sum"), {"scale": 3}),
    ),
    "encoder": (encoder, [("layers.0", 0), ("layers.1", 0)], lambda n: numbers(n, 7, 8)),
}


def new(make):
    torch.manual_seed(0)
    return make().eval().requires_grad_(False)


def activations(network, boundaries, args, kwargs):
    """The obvious slow way: one forward per boundary, stopped there."""
    found = []
    for path, leaf in boundaries:

        def keep(module, args, output, leaf=leaf):
            flat = [output] if isinstance(output, torch.Tensor) else None
            if isinstance(output, dict):
                flat = [output["output"].last]
            flat = flat or [output[0], *(output[1] if isinstance(output[1], tuple) else output[1:])]
            found.append(flat[leaf].clone())

        handle = network.get_submodule(path).register_forward_hook(keep)
        network(*args, **kwargs)
        handle.remove()
    return found


def int8_activations(network, boundaries, args, kwargs):
    """Those of a copy of ``network`` in int8."""
    network = copy.deepcopy(network)
    Int8Layers(network)
    torch.backends.mha.set_fastpath_enabled(False)  # it would read the weights past int8
    try:
        return activations(network, boundaries, args, kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def assert_close(case):
    make, boundaries, call = CASES[case]
    network = new(make)
    for samples in (8, 5):
        given = (network, boundaries, *call(samples))
        for got, wanted in zip(int8_activations(*given), activations(*given), strict=True):
            assert got.dtype == torch.float32
            assert got.shape == wanted.shape
            assert (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("case", CASES)
def test_close_to_float32_on_other_inputs_and_batch_sizes(case):
    assert_close(case)


@pytest.mark.parametrize("case", CASES)
def test_close_to_float32_on_processors_without_vnni(case, monkeypatch):
    """Inputs have 7 bits there; this test fails without that on such a processor, and runs on all."""
    monkeypatch.setattr("lightning_egeria.freezing.int8._input_steps", lambda: 127)
    assert_close(case)


def test_int8_is_what_ran():
    network = new(convolutions)
    (args, kwargs), boundaries = numbers(8, 3, 14, 14), [("0", 0)]
    (got,) = int8_activations(network, boundaries, args, kwargs)
    assert not torch.allclose(got, activations(network, boundaries, args, kwargs)[0], atol=1e-5)


def test_the_other_branch_is_taken():
    network = new(Branching)
    int8 = copy.deepcopy(network)
    Int8Layers(int8)
    int8(torch.rand(4, 6))
    x = -torch.rand(4, 6)
    assert torch.allclose(int8(x), network.negative(x), atol=0.02)


def test_restore_puts_float32_back():
    network = new(convolutions)
    x = torch.randn(4, 3, 14, 14)
    expected = network(x)
    layers = Int8Layers(network)
    assert not torch.equal(network(x), expected)
    layers.restore()
    layers.restore()
    assert not any("forward" in vars(module) for module in network.modules())
    assert torch.equal(network(x), expected)


def test_values_that_are_not_finite_are_not_hidden():
    network = new(lambda: nn.Sequential(nn.Linear(3, 3)))
    Int8Layers(network)
    assert network(torch.tensor([[1.0, float("nan"), 2.0]])).isnan().all()
    assert torch.equal(network(torch.zeros(2, 3))[0], network[0].bias)


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(UnsupportedError, match=r"no nn\.Linear or nn\.Conv2d"):
        Int8Layers(nn.LSTM(2, 2))


def test_a_torch_without_the_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.ops, "onednn", torch.ops.no_such_namespace)
    network = new(convolutions)
    with pytest.raises(UnsupportedError, match="cannot run Conv2d in int8"):
        Int8Layers(network)
    assert not any("forward" in vars(module) for module in network.modules())


def test_a_kernel_that_has_changed_is_named(monkeypatch):
    """Each layer then runs in float32, and nothing is called int8."""

    def changed(*_):
        raise RuntimeError("qlinear_pointwise() is missing value for argument 'new'\nDeclaration: ...")

    network = new(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    x = torch.randn(2, 3)
    expected = network(x)
    layers = Int8Layers(network)
    monkeypatch.setattr("lightning_egeria.freezing.int8._quantized_input", changed)
    assert torch.equal(network(x), expected)
    assert layers.ran == set()
    text = "2 of 2 layers run in float32 instead of int8, such as '0': qlinear_pointwise() is missing value for"
    assert layers.describe() == f"{text} argument 'new'"


def test_a_reference_without_its_kernels_says_so(monkeypatch):
    network = new(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2)))
    chain = LayerChain.trace(network.requires_grad_(True), lambda: network(torch.ones(4, 3)).sum())
    monkeypatch.setattr("lightning_egeria.freezing.int8._quantized_input", lambda _: no_kernel())
    reference = ReferenceModel(chain, 8, "int8")
    calls = [NetworkCall("", (torch.randn(4, 3),), {})]
    evaluation = EvaluationRequest(calls, {"": copy.deepcopy(network)}, 0)
    answer = reference(evaluation, {"": copy.deepcopy(network)})
    assert answer.precision != "int8"
    assert "2 of 2 layers run in float32 instead of int8" in answer.reason or "3 of 3 layers" in answer.reason


def no_kernel():
    raise RuntimeError("there is no such kernel")
