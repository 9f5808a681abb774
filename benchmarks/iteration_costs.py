"""What does an iteration cost by the number of layer modules that it goes back through? For `jigsaw.py`.

Writes ``iteration_costs/NETWORK.json``: seconds of the forward f, and of the backward with the optimizer b(d), and
bytes, by depth d. The data are random. On the CPU it measures the CPU time of one thread, which other work on the
machine hardly changes.

    python benchmarks/iteration_costs.py [NETWORK ...] [--batch 64] [--rounds 20] [--device cpu] [--out FOLDER]
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_egeria import LayerChain
from lightning_egeria.core.network.paused import PausedPrefix
from lightning_egeria.core.network.saved import SavedActivations
from lightning_egeria.core.profiling.clock import mark, reached, seconds_between
from lightning_egeria.core.programs.files import write_whole
from lightning_egeria.demos.mobilenet import cifar_mobilenet_v2
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.demos.sentences import BertEncoder, SentenceNet

FOLDER = Path(__file__).parent / "iteration_costs"
CLASSES, WORDS, TOKENS = 10, 1000, 32
SETTLING_ROUNDS = 2  # while allocators and caches settle
VERSION = 1
Mark = float | torch.cuda.Event
NETWORKS = {
    "resnet20": lambda: CifarResNet(20),
    "resnet56": lambda: CifarResNet(56),
    "mobilenetv2": cifar_mobilenet_v2,
    "minilm": lambda: SentenceNet(BertEncoder(WORDS), CLASSES),
}


@dataclasses.dataclass(frozen=True)
class DepthCosts:
    """Costs of an iteration that goes back through the last 1, 2, ... layer modules.

    Attributes:
        forward_s: seconds of the forward, by depth: in front of the last layer modules it records nothing.
        backward_s: seconds of the backward, and of the optimizer if it was measured.
        bytes: weights, buffers, gradients, and what autograd saves.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    bytes: tuple[int, ...]

    def write(self, path: Path) -> None:
        """Write them as JSON, as `benchmarks/jigsaw.py` reads them."""
        write_whole(path, json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n")


def measure_depths(
    module: nn.Module,
    chain: LayerChain,
    loss: Callable[[], Tensor],
    update: Callable[[], object] = lambda: None,
    rounds: int = 10,
    now: Callable[[torch.device], Mark] = mark,
) -> DepthCosts:
    """Measure iterations at each depth, in turns; times are medians.

    Temporary memory of single operations, and the state of the optimizer, do not count.

    Args:
        module: the network, with its parameters on one device.
        chain: its layer chain.
        loss: runs the forward on a batch and returns the loss.
        update: changes the parameters, as ``optimizer.step`` does.
        rounds: how often each depth is measured.
        now: returns the time on a device. With one thread on a shared machine, the CPU time is the better one.
    """
    paused, depths = PausedPrefix(module, chain), len(chain)
    device = next(module.parameters()).device
    times: list[list[tuple[float, float]]] = [[] for _ in range(depths)]
    for round_ in range(SETTLING_ROUNDS + rounds):
        for depth in range(1, depths + 1):
            module.zero_grad(set_to_none=True)
            paused.pause(depths - depth)
            try:
                began = now(device)
                value = loss()
                forward_ended = now(device)
                value.backward()
                update()
                ended = now(device)
            finally:
                paused.end()
            if not reached(ended):
                torch.cuda.synchronize(device)
            if round_ >= SETTLING_ROUNDS:
                times[depth - 1].append((seconds_between(began, forward_ended), seconds_between(forward_ended, ended)))
    bytes = tuple(_bytes_of(module, paused, loss, depths - depth) for depth in range(1, depths + 1))
    forward_s, backward_s = (
        tuple(statistics.median(pair[place] for pair in pairs) for pairs in times) for place in (0, 1)
    )
    module.zero_grad(set_to_none=True)
    return DepthCosts(forward_s, backward_s, bytes)


def _bytes_of(module: nn.Module, paused: PausedPrefix, loss: Callable[[], Tensor], pause: int) -> int:
    saved = SavedActivations(module.parameters())
    paused.pause(pause)
    saved.start()
    try:
        loss()
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    finally:
        saved.stop()
        paused.end()
    held = [*module.parameters(), *module.buffers(), *learning]  # a gradient is as large as its parameter
    return saved.nbytes + sum(tensor.nbytes for tensor in held)


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
