"""What does an evaluation of the reference model cost in each precision, how close is it, and what can it not run?

Each network takes a few training steps, and is then run on one thread as a reference model is. Printed are the median
time of a run that gives the Gram matrix of every boundary; the float32 time over it, as the median of the ratios of
neighbours; how much of the run is spent on the Gram matrices; the time to build the network from a snapshot; and how
far a row of the worst Gram matrix is off, as a fraction of its length. A second table says in which precision networks
of unusual kinds run.

    python benchmarks/reference.py [--networks resnet56,encoder] [--rounds 5]

Without bfloat16 or int8 instructions the order is another one. ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI`` in the
environment shows a machine that has only the latter.
"""

import argparse
import functools
import math
import os
import platform
import statistics
import time
import unittest.mock

import timm
import torch
from torch import nn

from lightning_egeria import LayerChain
from lightning_egeria.core.network.calls import NetworkCall
from lightning_egeria.core.network.chain import LayerModule
from lightning_egeria.core.snapshots.packing import pack
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.freezing import precision as precision_module
from lightning_egeria.freezing.precision import SnapshotNetwork
from lightning_egeria.freezing.reference import EvaluationRequest
from lightning_egeria.freezing.similarity import gram_distance, gram_matrix


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


def trained(make, shape) -> tuple[nn.Module, LayerChain]:
    """A network after three steps, so that its normalisation has seen data, and its layer chain."""
    network = make().train()
    chain = LayerChain.trace(network, lambda: network(torch.randn(8, *shape[1:])).square().mean())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for _ in range(3):
        network(torch.randn(8, *shape[1:])).flatten(1).log_softmax(1)[:, 0].mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return network, chain


def seconds(function, *arguments) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def gram_seconds(network: SnapshotNetwork, calls) -> float:
    """How much of one run goes into the Gram matrices."""
    spent = []

    def timed(activation):
        start = time.perf_counter()
        gram = gram_matrix(activation)
        spent.append(time.perf_counter() - start)
        return gram

    with unittest.mock.patch.object(precision_module, "gram_matrix", timed):
        network.boundary_grams(calls)
    return sum(spent)


def compare(name: str, rounds: int) -> None:
    """Print one network's rows."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    network, chain = trained(make, shape)
    calls = [NetworkCall("", (torch.randn(shape),), {})]
    full = SnapshotNetwork({"": network}, chain, 64)
    networks, builds = {"float32": full}, {"float32": 0.0}
    for precision in ("bf16", "int8"):
        start = time.perf_counter()
        networks[precision] = full.lowered(precision)
        builds[precision] = time.perf_counter() - start
    times = {precision: [] for precision in networks}
    for index in range(rounds + 1):
        for precision in list(networks)[:: 1 if index % 2 else -1]:
            times[precision].append(seconds(networks[precision].boundary_grams, calls))
    expected = full.boundary_grams(calls)[0]
    for precision in networks:
        found = networks[precision].boundary_grams(calls)[0]
        errors = [(shape[0] * gram_distance(a, b)).sqrt().item() for a, b in zip(found, expected, strict=True)]
        own = times[precision][1:]
        speed = statistics.median(a / b for a, b in zip(times["float32"][1:], own, strict=True))
        grams = statistics.median(gram_seconds(networks[precision], calls) for _ in range(3))
        print(
            f"{name:12s} {precision:8s} {statistics.median(own) * 1000:8.1f} ms {speed:6.2f} {grams * 1000:8.1f} ms "
            f"{builds[precision]:7.2f} s {max(errors):10.4f}",
            flush=True,
        )


def blocking(name: str, rounds: int) -> None:
    """Print how long the training thread needs for a snapshot, and what an evaluation of 64 samples sends."""
    make, shape = NETWORKS[name]
    network = make()
    packing, copying = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        parcel = pack({"": network}, for_process=True)
        packing.append(time.perf_counter() - start)
        kept = parcel.to_host()
        copying.append(time.perf_counter() - start - packing[-1])
    sent = pack(
        EvaluationRequest([NetworkCall("", (torch.zeros(64, *shape[1:]),), {})], {"": network}, 0), for_process=True
    )
    print(
        f"{name}: a snapshot of {kept.size_bytes / 1e6:.0f} MB keeps the training thread for "
        f"{statistics.median(packing) * 1000:.0f} + {statistics.median(copying) * 1000:.0f} ms (structure, tensors); "
        f"an evaluation sends {sent.size_bytes / 1e6:.1f} MB, {kept_input(shape) / 1e6:.1f} of it inputs",
        flush=True,
    )


def kept_input(shape) -> int:
    """Bytes of 64 samples."""
    return 64 * 4 * math.prod(shape[1:])


def try_odd(name: str, precision: str) -> str:
    """What becomes of one unusual network."""
    make, call = ODD[name]
    torch.manual_seed(0)
    network = make()
    args, kwargs = call(8)
    layer_module = LayerModule("network", "", 0, (), (), (), 1)
    chain = LayerChain((layer_module,), ("",), 0)
    full = SnapshotNetwork({"": network}, chain, 64)
    try:
        low = full.lowered(precision)
        found = low.boundary_grams([NetworkCall("", args, kwargs)])[0][0]
    except Exception as error:  # any of them is a result here
        return f"{type(error).__name__}: {error}".splitlines()[0][:60]
    wanted = full.boundary_grams([NetworkCall("", args, kwargs)])[0][0]
    return f"runs, rows off by {(8 * gram_distance(found, wanted)).sqrt().item():.4f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all that the machine has")
    print(f"1 thread, torch {torch.__version__}, {platform.machine()}, instructions: {isa}")
    print("network      precision       run   speed       Grams     build  row error")
    for name in options.networks.split(","):
        compare(name, options.rounds)
    print()
    for name in options.networks.split(","):
        blocking(name, 9)
    print()
    for name in ODD:
        for precision in ("bf16", "int8"):
            print(f"{name:30s} {precision:8s} {try_odd(name, precision)}", flush=True)


if __name__ == "__main__":
    main()
