"""What freezing saves of the gradient exchange: bytes on the wire and step time on a link of limited bandwidth.

Two processes train one model under DDP, each in a network namespace of its own; all that they exchange goes through a
pair of virtual network devices whose rate ``tc`` limits in both directions. The frozen depth rises during a run. Two
ways to freeze take turns: the callback, and what is usual, the same front frozen by hand under
``find_unused_parameters=True``. Printed are, for each depth, the gradients that a step has to exchange, the bytes that
the kernel counted as sent by one process in a step, and the median time of a step.

Needs Linux, root, ``ip`` and ``tc``. With ``--rate 0`` the two talk through the loopback device instead, without root.

    python benchmarks/communication.py [--model resnet56] [--rate 1gbit] [--runs 3] [--steps 12] [--depths 5]
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning
import timm
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import KnowledgeGuidedFreezing, PrefixFreezing, ScriptedPolicy
from lightning_egeria.demos.resnet import CifarResNet

WARM_UP_STEPS = 4  # after each change of depth: DDP orders its buckets in the second step
LOOPBACK = "lo"
NAMESPACES = ("egeria0", "egeria1")
MODELS = {  # how to make it, and the size of its images
    "resnet56": (lambda: CifarResNet(56), 32),
    "resnet18": (lambda: timm.create_model("resnet18", num_classes=10), 64),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10), 64),
}


class Classifier(lightning.LightningModule):
    """The network under test, on random data."""

    def __init__(self, name: str, batch_size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, self.size = MODELS[name]
        self.net = make()
        self.batch_size = batch_size

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def train_dataloader(self):
        count = 8 * self.batch_size
        return DataLoader(
            TensorDataset(torch.randn(count, 3, self.size, self.size), torch.randint(10, (count,))), self.batch_size
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)


class ByHand(lightning.Callback):
    """Freezes as is usual: DDP is not told."""

    def __init__(self, schedule: dict[int, int], chain) -> None:
        self.schedule, self.chain = schedule, chain

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        depth = self.schedule.get(trainer.global_step)
        if depth is None:
            return
        modules, parameters = dict(pl_module.named_modules()), dict(pl_module.named_parameters())
        for layer_module in self.chain.layer_modules[:depth]:
            for path in layer_module.members:
                modules[path].training = False
            for name in layer_module.parameters:
                parameters[name].requires_grad_(False)
                parameters[name].grad = None


class Watch(lightning.Callback):
    """Seconds of each step, and the bytes that this process sent in it; must be the first of the callbacks."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[tuple[float, float]] = []

    def sent(self) -> float:
        lines = Path("/proc/net/dev").read_text().splitlines()
        numbers = next(line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{self.device}:"))
        return int(numbers[8]) / (2 if self.device == LOOPBACK else 1)  # which counts what both have sent

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        torch.distributed.barrier()
        self.before, self.began = self.sent(), time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append((time.perf_counter() - self.began, self.sent() - self.before))


def train_quietly(
    module: lightning.LightningModule, callbacks: list[lightning.Callback], steps: int, find_unused: bool = False
) -> None:
    """Train one of two ranks; what Lightning prints goes to stderr, since the result goes to stdout."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=find_unused),
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.redirect_stdout(sys.stderr):
        trainer.fit(module)


def run(options: argparse.Namespace, freezing: lightning.Callback, find_unused: bool, steps: int) -> Watch:
    """One training run; what each step took."""
    watch = Watch(options.device)
    train_quietly(Classifier(options.model, options.batch_size), [watch, freezing], steps, find_unused)
    return watch


def rank(options: argparse.Namespace) -> None:
    """One of the two processes."""
    os.environ.update(LOCAL_RANK=str(options.rank), GLOO_SOCKET_IFNAME=options.device)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    warnings.simplefilter("ignore")
    # Which depths there are is only known when a step has been seen.
    first = PrefixFreezing()
    run(options, first, False, 1)
    chain = first.freezer.chain
    count = min(options.depths, chain.max_depth + 1)
    depths = [round(chain.max_depth * number / max(1, count - 1)) for number in range(count)]
    schedule = {options.steps * number: depth for number, depth in enumerate(depths) if depth}
    found: dict[str, list[Watch]] = {"callback": [], "by hand": []}
    exchanged: list[int] = []
    for _ in range(options.runs):
        ours = KnowledgeGuidedFreezing(ScriptedPolicy(schedule), evaluate_every_n_steps=options.steps)
        found["callback"].append(run(options, ours, False, options.steps * count))
        found["by hand"].append(run(options, ByHand(schedule, chain), True, options.steps * count))
        exchanged = [ours.freezer.prefix.gradient_bytes(depth) for depth in depths]
    rows = []
    for number, depth in enumerate(depths):
        row: dict[str, float] = {"depth": depth, "exchanged": exchanged[number]}
        place = slice(options.steps * number + WARM_UP_STEPS, options.steps * (number + 1))
        for way, watches in found.items():
            steps = [step for watch in watches for step in watch.steps[place]]
            row[f"{way} seconds"] = statistics.median(seconds for seconds, _ in steps)
            row[f"{way} sent"] = statistics.median(sent for _, sent in steps)
        rows.append(row)
    if options.rank == 0:
        print(json.dumps(rows), flush=True)
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def link(rate: str):
    """Two namespaces with a limited link between them; gives what to put in front of a command in each."""
    if rate == "0":
        yield [[], []], LOOPBACK, "127.0.0.1"
        return

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in NAMESPACES:
            ip("netns", "add", name)
        ip("link", "add", "egeria", "netns", NAMESPACES[0], "type", "veth", "peer", "egeria", "netns", NAMESPACES[1])
        for number, name in enumerate(NAMESPACES):
            ip("-n", name, "addr", "add", f"10.213.0.{number + 1}/24", "dev", "egeria")
            ip("-n", name, "link", "set", "egeria", "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ["qdisc", "add", "dev", "egeria", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, *limit], check=True)
        yield [["ip", "netns", "exec", name] for name in NAMESPACES], "egeria", "10.213.0.1"
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def in_two_ranks(script: str, rate: str) -> list:
    """Run a script with its own arguments as two ranks, on a link of a rate; returns what rank 0 printed as JSON."""
    with link(rate) as (prefixes, device, address):
        environment = {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": "29511"}
        processes = [
            subprocess.Popen(
                [*prefix, sys.executable, script, *sys.argv[1:], "--rank", str(number), "--device", device],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if number else subprocess.PIPE,
                text=True,
            )
            for number, prefix in enumerate(prefixes)
        ]
        answer, complaints = processes[0].communicate()
        processes[1].wait()
    if any(process.returncode for process in processes):
        sys.exit(f"a process failed:\n{complaints}")
    return json.loads(answer.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet56")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it; 0: no link, loopback")
    parser.add_argument("--runs", type=int, default=3, help="of each way")
    parser.add_argument("--steps", type=int, default=12, help="at each depth")
    parser.add_argument("--depths", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    rows = in_two_ranks(__file__, options.rate)
    print(
        f"{options.model}, batch {options.batch_size} on each of 2 ranks, link {options.rate}, {platform.machine()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}"
    )
    print("        gradients  sent by a rank (MB)       step (ms)            callback/   of an unfrozen")
    print("frozen  (MB)       callback   by hand   callback   by hand   by hand     step")
    for row in rows:
        ours, hand = row["callback seconds"], row["by hand seconds"]
        print(
            f"{row['depth']:6d} {row['exchanged'] / 1e6:9.3f} {row['callback sent'] / 1e6:12.3f} "
            f"{row['by hand sent'] / 1e6:9.3f} {ours * 1000:10.1f} {hand * 1000:9.1f} {ours / hand:9.3f} "
            f"{ours / rows[0]['callback seconds']:10.3f}"
        )


if __name__ == "__main__":
    main()
