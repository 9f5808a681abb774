"""What does an evaluation of the reference model cost in each precision, how close is it, and what can it not run?

Each network takes a few training steps, and is then run in evaluation mode on one thread on samples that the int8
network has not seen. Printed are the median time of a forward that gives every boundary activation; the float32 time
over it, as the median of the ratios of neighbours; the time to build it from new weights; the median time of the
Gram matrices, which comes on top; and how far a row of the worst Gram matrix is off, as a fraction of its length. A
second table runs networks of unusual kinds in int8, on a second input of another batch size.

    python benchmarks/reference.py [--networks resnet56,encoder] [--rounds 5]

Without bfloat16 or int8 instructions the order is another one. ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI`` in the
environment shows a machine that has only the latter.
"""

import argparse
import copy
import functools
import os
import platform
import statistics
import time

import timm
import torch
from torch import nn

from lightning_egeria import LayerChain
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.freezing.int8 import Int8Layers, Int8Network
from lightning_egeria.freezing.similarity import gram_distance, gram_matrix
from lightning_egeria.tracing import ForwardReplacements, tensor_leaves


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


NETWORKS = {
    "resnet56": (functools.partial(CifarResNet, 56), (64, 3, 32, 32)),
    "resnet50": (functools.partial(timm.create_model, "resnet50"), (16, 3, 224, 224)),
    "vit_tiny": (functools.partial(timm.create_model, "vit_tiny_patch16_224"), (16, 3, 224, 224)),
    "mobilenetv2": (functools.partial(timm.create_model, "mobilenetv2_100"), (16, 3, 224, 224)),
    "encoder": (encoder, (64, 64, 256)),
}


class Branching(nn.Module):
    """Which layer runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.positive(x) if x.sum().item() > 0 else self.negative(x)


class Mappings(nn.Module):
    """A mapping in, a mapping out, an argument that is no tensor, attention between."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(30, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.out = nn.Linear(16, 16)

    def forward(self, batch, mode="mean"):
        hidden = self.words(batch["ids"])
        return {"state": getattr(self.out(self.attention(hidden, hidden, hidden)[0]), mode)(1), "mode": mode}


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))


def spectral(normalize) -> nn.Module:
    return nn.Sequential(normalize(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 16))


def numbers(*shape: int):
    return lambda samples: ((torch.randn(samples, *shape),), {})


ODD = {
    "branch on .item()": (Branching, numbers(16)),
    "mapping in and out": (Mappings, lambda n: (({"ids": torch.randint(30, (n, 5 + n % 2))}, "sum"), {})),
    "LSTM": (lambda: nn.LSTM(16, 16, batch_first=True), numbers(5, 16)),
    "custom autograd function": (CustomFunction, numbers(16)),
    "spectral_norm parametrization": (lambda: spectral(nn.utils.parametrizations.spectral_norm), numbers(16)),
    "spectral_norm hooks": (lambda: spectral(nn.utils.spectral_norm), numbers(16)),
    "TransformerEncoder, one layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), numbers(5, 16)),
    "timm convnext_atto": (lambda: timm.create_model("convnext_atto"), numbers(3, 64, 64)),
    "timm swin_tiny": (lambda: timm.create_model("swin_tiny_patch4_window7_224"), numbers(3, 224, 224)),
}


def boundary_grams(network: nn.Module, boundaries, x, take=gram_matrix) -> list[torch.Tensor]:
    """What ``take`` makes of each boundary activation, taken while the network runs."""
    taken = []

    def recording(leaf, original):
        def forward(*args, **kwargs):
            output = original(*args, **kwargs)
            taken.append(take(list(tensor_leaves(output))[leaf]))
            return output

        return forward

    replacements = ForwardReplacements()
    try:
        for path, leaf in boundaries:
            replacements.replace(network.get_submodule(path), functools.partial(recording, leaf))
        with torch.no_grad():
            network(x)
    finally:
        replacements.restore()
    return taken


def trained(make, shape) -> tuple[nn.Module, list[tuple[str, int]]]:
    """A network after three steps, so that its normalisation has seen data, and its boundaries."""
    network = make().train()
    chain = LayerChain.trace(network, lambda: network(torch.randn(8, *shape[1:])).square().mean())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(3):
        network(torch.randn(8, *shape[1:])).flatten(1).log_softmax(1)[:, 0].mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    network.eval().requires_grad_(False)
    return network, [(layer_module.boundary, layer_module.output_leaf) for layer_module in chain.layer_modules]


def channels_last(value):
    """Modules and images with the channels last in memory, anything else as it is."""
    images = isinstance(value, nn.Module) or value.ndim == 4
    return value.to(memory_format=torch.channels_last) if images else value


def in_int8(network: nn.Module) -> nn.Module:
    Int8Layers(network)
    return network


BUILDS = {
    "float32": lambda network: network,
    "float32 channels last": channels_last,
    "bfloat16": lambda network: channels_last(network.to(torch.bfloat16)),
    "int8": in_int8,
}


def use_fast_path(precision: str) -> None:
    """The fused kernel of nn.TransformerEncoderLayer knows no int8; the others may have it."""
    torch.backends.mha.set_fastpath_enabled(precision != "int8")


def seconds(function, *arguments) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def compare(name: str, rounds: int) -> None:
    """Print one network's rows."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, boundaries = trained(make, shape)
    x = torch.randn(shape)
    networks, inputs, builds = {}, {}, {}
    for precision, build in BUILDS.items():
        copied = copy.deepcopy(network)
        start = time.perf_counter()
        networks[precision] = build(copied)
        builds[precision] = time.perf_counter() - start
        low = x.bfloat16() if precision == "bfloat16" else x
        inputs[precision] = low if precision == "float32" else channels_last(low)
    times = {precision: [] for precision in BUILDS}
    for index in range(rounds + 1):
        for precision in list(BUILDS)[:: 1 if index % 2 else -1]:
            use_fast_path(precision)
            run = functools.partial(boundary_grams, networks[precision], boundaries, inputs[precision], lambda a: None)
            times[precision].append(seconds(run))
    use_fast_path("float32")
    expected = boundary_grams(network, boundaries, x)
    for precision in BUILDS:
        use_fast_path(precision)
        found = boundary_grams(networks[precision], boundaries, inputs[precision])
        errors = [(shape[0] * gram_distance(a, b)).sqrt().item() for a, b in zip(found, expected, strict=True)]
        grams = []
        for _ in range(rounds):
            spent = []
            boundary_grams(
                networks[precision], boundaries, inputs[precision], lambda a, s=spent: s.append(seconds(gram_matrix, a))
            )
            grams.append(sum(spent))
        own = times[precision][1:]
        speed = statistics.median(a / b for a, b in zip(times["float32"][1:], own, strict=True))
        print(
            f"{name:12s} {precision:22s} {statistics.median(own) * 1000:8.1f} ms {speed:6.2f} "
            f"{builds[precision]:7.2f} s {statistics.median(grams) * 1000:8.1f} ms {max(errors):10.4f}",
            flush=True,
        )


def try_odd(name: str) -> str:
    """What int8 makes of one unusual network."""
    make, call = ODD[name]
    torch.manual_seed(0)
    network = make().eval().requires_grad_(False)
    try:
        int8 = Int8Network(copy.deepcopy(network), [("", 0)], *call(8))
        args, kwargs = call(5)
        with torch.no_grad():
            wanted = next(tensor_leaves(network(*args, **kwargs)))
        (found,) = int8(args, kwargs)
    except Exception as error:  # any of them is a result here
        return f"{type(error).__name__}: {error}"
    return f"runs, rows off by {(5 * gram_distance(gram_matrix(found), gram_matrix(wanted))).sqrt().item():.4f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all that the machine has")
    print(f"1 thread, torch {torch.__version__}, {platform.machine()}, instructions: {isa}")
    print("network      precision               forward   speed     build        Grams  row error")
    for name in options.networks.split(","):
        compare(name, options.rounds)
    print("\nin int8")
    for name in ODD:
        print(f"{name:30s} {try_odd(name)}", flush=True)


if __name__ == "__main__":
    main()
