"""Is the backward that a freeze saves really saved? Step time at each depth, over the same step frozen by hand.

Two ResNet-56 take the same training steps on the same batch in turn: one under the callback with a scripted policy,
one with the same front frozen by hand. Printed is, for each depth, the median time of a step under the callback, that
of the step written by hand, the median of the ratio of neighbours, and what is left of a step with nothing frozen.

    python benchmarks/step_time.py [--depth 56] [--batch-size 32] [--pairs 9] [--every 1]
"""

import argparse
import platform
import statistics
import time
import types

import lightning
import torch
from torch import nn

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.resnet import CifarResNet

WARM_UP_PAIRS = 2


class Classifier(lightning.LightningModule):
    """The network under test."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.net = CifarResNet(depth)


def new_model(depth: int) -> tuple[Classifier, torch.optim.Optimizer]:
    """A model and its optimizer, equal at each call."""
    torch.manual_seed(0)
    model = Classifier(depth)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def plain_step(model, optimizer, images, labels, before_backward=None, after_backward=None) -> None:
    """One training step."""
    loss = nn.functional.cross_entropy(model.net(images), labels)
    optimizer.zero_grad()
    if before_backward:
        before_backward(loss)
    loss.backward()
    if after_backward:
        after_backward()
    optimizer.step()


class UnderCallback:
    """The same step inside the callback's hooks, in the order in which Lightning calls them."""

    def __init__(self, depth: int, frozen: int, total_steps: int) -> None:
        self.model, self.optimizer = new_model(depth)
        self.callback = KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen}))
        self.trainer = types.SimpleNamespace(
            global_step=0,
            optimizers=[self.optimizer],
            fast_dev_run=False,
            estimated_stepping_batches=total_steps,
            num_training_batches=total_steps,
            limit_train_batches=1.0,
            accumulate_grad_batches=1,
            progress_bar_callback=None,
            loggers=[],
            fit_loop=types.SimpleNamespace(),
            strategy=types.SimpleNamespace(model=None, root_device=torch.device("cpu")),
        )
        self.callback.on_fit_start(self.trainer, self.model)
        self.callback.on_train_start(self.trainer, self.model)

    def step(self, images, labels) -> None:
        hooks, trainer, model = self.callback, self.trainer, self.model
        hooks.on_train_batch_start(trainer, model, (images, labels), trainer.global_step)
        plain_step(
            model,
            self.optimizer,
            images,
            labels,
            lambda loss: hooks.on_before_backward(trainer, model, loss),
            lambda: hooks.on_after_backward(trainer, model),
        )
        trainer.global_step += 1
        hooks.on_train_batch_end(trainer, model, None, (images, labels), trainer.global_step - 1)


def freeze_by_hand(model: Classifier, frozen: int) -> None:
    """What a careful user writes: the stem and the first blocks without gradients, in evaluation mode."""
    net = model.net
    blocks = [nn.ModuleList([net.conv1, net.bn1]), *net.layer1, *net.layer2, *net.layer3]
    for block in blocks[:frozen]:
        block.requires_grad_(False).eval()
        block.zero_grad(set_to_none=True)


def seconds(function, *arguments) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=56)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--every", type=int, default=1, help="measure every n-th depth")
    options = parser.parse_args()
    images = torch.randn(options.batch_size, 3, 32, 32)
    labels = torch.randint(10, (options.batch_size,))
    print(
        f"ResNet-{options.depth}, batch {options.batch_size}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, lightning {lightning.__version__}, {platform.machine()}"
    )
    print("frozen   callback    by hand   callback/by hand   of a full step")
    full, ratios_of_depths = None, []
    for frozen in range(0, (options.depth - 2) // 2, options.every):
        under = UnderCallback(options.depth, frozen, options.pairs)
        model, optimizer = new_model(options.depth)
        under.step(images, labels)  # the chain is found here, and the script freezes after it
        plain_step(model, optimizer, images, labels)
        freeze_by_hand(model, frozen)
        pairs = []
        for index in range(WARM_UP_PAIRS + options.pairs):
            if index % 2:  # who goes first changes, or a drift of the machine would favour one
                by_hand = seconds(plain_step, model, optimizer, images, labels)
                pair = (seconds(under.step, images, labels), by_hand)
            else:
                pair = (seconds(under.step, images, labels), seconds(plain_step, model, optimizer, images, labels))
            pairs.append(pair)
        assert under.callback.frozen_depth == frozen
        pairs = pairs[WARM_UP_PAIRS:]
        ours, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        full = full or hand
        ratios_of_depths.append(ratio)
        print(f"{frozen:6d} {ours * 1000:8.1f} ms {hand * 1000:7.1f} ms {ratio:18.3f} {ours / full:16.3f}", flush=True)
    worst = max(ratios_of_depths)
    print(f"callback/by hand: median {statistics.median(ratios_of_depths):.3f}, largest {worst:.3f}")


if __name__ == "__main__":
    main()
