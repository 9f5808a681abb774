"""A snapshot of training and its restoring, beside one copy of the same tensors.

Both take turns in one run; the ratio of their medians is what counts. Branch tuning takes a snapshot for each trial.

python benchmarks/snapshot.py
python benchmarks/snapshot.py --width 64 --depth 2 --repeats 3
"""

import argparse
import statistics
import time

import torch
from torch import nn

from lightning_egeria import TrainingState
from lightning_egeria.core.snapshots.tensor_store import TensorStore


def network(width, depth):
    """Blocks of a transformer's size, with their parameters, gradients and the state of AdamW."""
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(depth))
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    net(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    return net, optimizer


def tensors_of(net, optimizer):
    """All tensors of the state of training."""
    kept = [*net.parameters(), *net.buffers(), *(parameter.grad for parameter in net.parameters())]
    return [*kept, *(value for state in optimizer.state.values() for value in state.values())]


def seconds(call, *arguments):
    """How long a call takes, and what it returns."""
    started = time.perf_counter()
    result = call(*arguments)
    return time.perf_counter() - started, result


def copied(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def written_back(tensors, copies):
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)


def measured(net, optimizer, most_bytes, repeats):
    """Medians of the times of each part."""
    times = {"copy": [], "snapshot": [], "write": [], "restore": []}
    for _ in range(repeats):
        store = None if most_bytes is None else TensorStore(most_bytes)
        tensors = tensors_of(net, optimizer)
        with torch.no_grad():  # a step changes everything
            for tensor in tensors:
                tensor.add_(1)
        taken, copies = seconds(copied, tensors)
        times["copy"].append(taken)
        times["write"].append(seconds(written_back, tensors, copies)[0])
        del copies
        taken, state = seconds(TrainingState, net, [optimizer], (), store)
        times["snapshot"].append(taken)
        times["restore"].append(seconds(state.restore)[0])
    return {part: statistics.median(values) for part, values in times.items()}


def main():
    """Print the ratios, with copies on the device, in a store, and in files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    net, optimizer = network(arguments.width, arguments.depth)
    tensors = tensors_of(net, optimizer)
    print(f"{sum(tensor.nbytes for tensor in tensors) / 2**20:.0f} MiB in {len(tensors)} tensors, as shares of a copy:")
    print("copies are    copy ms   snapshot   write back   restore")
    for name, most_bytes in (("on the device", None), ("in a store", 2**40), ("in files", 0)):
        median = measured(net, optimizer, most_bytes, arguments.repeats)
        snapshot, write, restore = (median[part] / median["copy"] for part in ("snapshot", "write", "restore"))
        print(f"{name:13} {median['copy'] * 1e3:7.1f} {snapshot:10.2f} {write:12.2f} {restore:9.2f}")


if __name__ == "__main__":
    main()
