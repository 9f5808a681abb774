"""What partial backprop saves: the backward at each cut, step time on a slow link, and a straggler's step.

* Without arguments: CPU time of the backward by the number of layer modules in front of the suffix, as a share of the
  whole one, in one process. Cuts take turns; medians are printed.
* ``--link 1gbit``: median step of two ranks on a link of that rate, for plain DDP and for each form, in turns. Needs
  Linux, root, ``ip`` and ``tc``; ``--link 0`` uses the loopback device.
* ``--straggler 1 2``: the same, with rank 1 slowed by 1 and by 2 milliseconds of sleep in forward and backward of each
  layer module, with plain DDP and with ``depths="weighted"``, beside the step without sleep.

    python benchmarks/partial_backprop.py [--link 1gbit] [--straggler MS ...] [--rounds 5] [--steps 40] [--width 256]
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.communication import in_two_ranks, train_quietly
from lightning_egeria import LayerChain, StructuredPartialBackprop
from lightning_egeria.core.network.paused import PausedPrefix

BLOCKS = 8


class Block(nn.Module):
    """A residual block, and a sleep in its forward and backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.sleep = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + self.inner(x)
        if self.sleep:
            time.sleep(self.sleep)
            if out.requires_grad:
                out.register_hook(lambda grad: time.sleep(self.sleep))
        return out


class Module(lightning.LightningModule):
    """Eight equal blocks on random data."""

    def __init__(self, width: int, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block(width) for _ in range(BLOCKS)), nn.Linear(width, 10))
        self.width, self.batch_size = width, batch_size

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        count = 16 * self.batch_size
        data = TensorDataset(torch.randn(count, self.width), torch.randint(10, (count,)))
        return DataLoader(data, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


def backward_by_cut(options: argparse.Namespace) -> None:
    """CPU time of the backward at each cut."""
    torch.set_num_threads(1)
    module = Module(options.width, options.batch_size)
    inputs, labels = torch.randn(options.batch_size, options.width), torch.zeros(options.batch_size, dtype=torch.long)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(module.net(inputs), labels)

    paused = PausedPrefix(module, LayerChain.trace(module, loss, [f"net.{index}" for index in range(BLOCKS)]))
    seconds: dict[int, list[float]] = {depth: [] for depth in range(BLOCKS)}
    for round_ in range(options.rounds * 4 + 2):
        for depth in seconds:
            module.zero_grad()
            paused.pause(depth)
            value = loss()
            began = time.process_time()
            value.backward()
            if round_ >= 2:
                seconds[depth].append(time.process_time() - began)
            paused.end()
    whole = statistics.median(seconds[0])
    print(f"{BLOCKS} blocks of width {options.width}, batch {options.batch_size}: whole backward {1000 * whole:.1f} ms")
    for depth, found in seconds.items():
        print(f"cut {depth}: {statistics.median(found) / whole:.2f} of it")


class Timer(lightning.Callback):
    """Seconds of each step; it slows this rank."""

    def __init__(self, sleep: float) -> None:
        self.sleep, self.seconds = sleep, []

    def on_train_start(self, trainer, pl_module):
        for part in pl_module.modules():
            if isinstance(part, Block):
                part.sleep = self.sleep
        self.mark = time.perf_counter()

    def on_train_batch_end(self, *_):
        now = time.perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now


def step_of(options: argparse.Namespace, form: str, sleep: float) -> float:
    """Mean step of the second half of a run."""
    timer = Timer(sleep if options.rank == 1 else 0.0)
    own = (
        [] if form == "plain" else [StructuredPartialBackprop(form, layer_modules=[f"net.{i}" for i in range(BLOCKS)])]
    )
    train_quietly(Module(options.width, options.batch_size), [*own, timer], options.steps)
    # The mean: temporal steps differ, and a cycle has four of them.
    return statistics.fmean(timer.seconds[len(timer.seconds) // 2 :])


def rank(options: argparse.Namespace) -> None:
    """One of two processes."""
    os.environ.update(LOCAL_RANK=str(options.rank), GLOO_SOCKET_IFNAME=options.device)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ways = [("plain", 0.0), ("temporal", 0.0), ("uniform", 0.0), ("weighted", 0.0)]
    if options.straggler:
        sleeps = [milliseconds / 1000 for milliseconds in options.straggler]
        ways = [("plain", 0.0), *((form, sleep) for sleep in sleeps for form in ("plain", "weighted"))]
    found: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way in ways:
            found[way].append(step_of(options, *way))
    if options.rank == 0:
        print(json.dumps([[*way, statistics.median(seconds)] for way, seconds in found.items()]), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each run; the second half is timed")
    parser.add_argument("--link", help="rate of the link between two ranks, as tc writes it; 0: loopback")
    parser.add_argument("--straggler", type=float, nargs="+", help="milliseconds of sleep in each pass of a block")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    if options.link is None and not options.straggler:
        backward_by_cut(options)
        return
    rows = in_two_ranks(__file__, options.link or "0")
    print(f"two ranks, width {options.width}, batch {options.batch_size}, link {options.link or 'loopback'}")
    for form, sleep, seconds in rows:
        slowed = f", rank 1 sleeps {1000 * sleep:g} ms in each pass of a block" if sleep else ""
        print(f"{form}{slowed}: step {1000 * seconds:.1f} ms, {seconds / rows[0][2]:.2f} of plain")


if __name__ == "__main__":
    main()
