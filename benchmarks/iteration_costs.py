"""What does an iteration cost by the number of layer modules that it goes back through? For `jigsaw.py`.

Writes ``iteration_costs/NETWORK.json``: seconds of the forward f, and of the backward with the optimizer b(d), and
bytes, by depth d. The data are random. On the CPU it measures the CPU time of one thread, which other work on the
machine hardly changes.

    python benchmarks/iteration_costs.py [NETWORK ...] [--batch 64] [--rounds 20] [--device cpu] [--out FOLDER]
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_egeria import LayerChain
from lightning_egeria.demos.mobilenet import cifar_mobilenet_v2
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.demos.sentences import BertEncoder, SentenceNet
from lightning_egeria.profiling.clock import mark
from lightning_egeria.profiling.depths import measure_depths

FOLDER = Path(__file__).parent / "iteration_costs"
CLASSES, WORDS, TOKENS = 10, 1000, 32
NETWORKS = {
    "resnet20": lambda: CifarResNet(20),
    "resnet56": lambda: CifarResNet(56),
    "mobilenetv2": cifar_mobilenet_v2,
    "minilm": lambda: SentenceNet(BertEncoder(WORDS), CLASSES),
}


def inputs_of(network: str, batch: int) -> Tensor:
    """Random images, or tokens."""
    return torch.randint(1, WORDS, (batch, TOKENS)) if network == "minilm" else torch.randn(batch, 3, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    options.out.mkdir(exist_ok=True)
    for name in options.networks or NETWORKS:
        torch.manual_seed(0)
        net: nn.Module = NETWORKS[name]().to(device)
        inputs = inputs_of(name, options.batch).to(device)
        labels = torch.arange(options.batch, device=device) % CLASSES

        def loss(net: nn.Module = net, inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(net(inputs), labels)

        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
        now = mark if device.type == "cuda" else lambda device: time.process_time()
        costs = measure_depths(net, LayerChain.trace(net, loss), loss, optimizer.step, options.rounds, now)
        costs.write(options.out / f"{name}.json")
        print(f"{name}, batch {options.batch}, {len(costs.bytes)} layer modules")
        for depth, (forward, backward, held) in enumerate(
            zip(costs.forward_s, costs.backward_s, costs.bytes, strict=True), 1
        ):
            print(
                f"  depth {depth}: f {forward * 1e3:.1f} ms, b {backward * 1e3:.1f} ms, {held / 1e6:.1f} MB", flush=True
            )


if __name__ == "__main__":
    main()
