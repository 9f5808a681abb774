"""Is the backward that a freeze saves really saved? Step time at each depth, over the same step frozen by hand.

Two equal networks train under a Trainer each, in turn: one with the callback and a scripted policy, one with the same
front frozen by hand. Printed are, for each depth, the median time of a step of both, the median of the ratio of
neighbours, and what is left of a step with nothing frozen.

    python -m benchmarks.step_time [--depth 56] [--batch-size 32] [--pairs 3] [--every 9]
"""

import argparse
import platform
import statistics

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cached_step import BATCHES, new_net, parts_of, train
from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy


def frozen_by_hand(name: str, frozen: int) -> nn.Module:
    """What a careful user writes: the first parts without gradients, in evaluation mode."""
    net = new_net(name)
    for part in parts_of(net)[:frozen]:
        part.requires_grad_(False).eval()
    return net


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=56, help="of the ResNet")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--every", type=int, default=9, help="measure every n-th depth")
    options = parser.parse_args()
    name, device = f"resnet{options.depth}", torch.device("cpu")
    rows = BATCHES * options.batch_size
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,)))
    loader = DataLoader(data, options.batch_size, shuffle=True)
    print(
        f"ResNet-{options.depth}, batch {options.batch_size}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, lightning {lightning.__version__}, {platform.machine()}"
    )
    print("frozen   callback    by hand   callback/by hand   of a full step")
    full, ratios = None, []
    for frozen in range(0, len(parts_of(new_net(name))) - 1, options.every):
        pairs = []
        for _ in range(options.pairs):
            freezing = KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen}))
            ours, _ = train(new_net(name), loader, device, freezing)
            assert freezing.frozen_depth == frozen
            pairs.append((ours, train(frozen_by_hand(name, frozen), loader, device)[0]))
        ours, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios.append(statistics.median(a / b for a, b in pairs))
        full = full or hand
        print(
            f"{frozen:6d} {ours * 1000:8.1f} ms {hand * 1000:7.1f} ms {ratios[-1]:18.3f} {ours / full:16.3f}",
            flush=True,
        )
    print(f"callback/by hand: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
