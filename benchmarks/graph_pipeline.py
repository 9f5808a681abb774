"""A graph pipeline against the chain of the same stages, six processes whose work is emulated by sleeping.

A stem, four branches, and an end take 20 ms forward and 40 ms backward each. Both plans take turns in one run.
"""

import argparse
import dataclasses
import os
import socket
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lightning_egeria import GraphPipeline
from lightning_egeria.pipelining.timeline import predict

BRANCHES = ("one", "two", "three", "four")


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(8)), seconds

    def forward(self, *inputs):
        return Sleep.apply(sum(inputs) * self.weight, self.seconds)


class Net(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.stem, self.end = Slow(seconds), Slow(seconds)
        self.branches = nn.ModuleDict({name: Slow(seconds) for name in BRANCHES})

    def forward(self, batch):
        x = self.stem(batch)
        return self.end(*(self.branches[name](x) for name in BRANCHES))


STAGES = {"stem": ["stem"], **{name: [f"branches.{name}"] for name in BRANCHES}, "end": ["end"]}


def run(rank, port, seconds, micro_batches, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=6, timeout=timedelta(seconds=120))
    batch = torch.ones(micro_batches, 8)
    settings = {"micro_batches": micro_batches, "stages": STAGES}
    graph = GraphPipeline(Net(seconds), batch, **settings)
    chain = GraphPipeline(Net(seconds), batch, **settings, plan=dataclasses.replace(graph.plan, is_chain=True))
    measured = {"graph": [], "chain": []}
    for _ in range(steps + 1):
        for name, pipeline in (("graph", graph), ("chain", chain)):
            dist.barrier()
            started = time.perf_counter()
            pipeline.step(batch, lambda output, batch: output.sum())
            dist.barrier()
            measured[name].append(time.perf_counter() - started)
    if rank == 0:
        found = {name: statistics.median(values[1:]) for name, values in measured.items()}  # the first learns shapes
        for name, pipeline in (("graph", graph), ("chain", chain)):
            predicted = predict(pipeline.plan).seconds
            print(
                f"{micro_batches} micro-batches, {name}: {found[name]:.3f} s a step, predicted {predicted:.3f} s, "
                f"in flight {', '.join(map(str, pipeline.plan.in_flight))}"
            )
        print(f"{micro_batches} micro-batches: throughput over the chain {found['chain'] / found['graph']:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--milliseconds", type=float, default=20, help="forward of a stage, half of its backward")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    arguments = parser.parse_args()
    for micro_batches in arguments.micro_batches:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(run, (port, arguments.milliseconds / 1e3, micro_batches, arguments.steps), nprocs=6)


if __name__ == "__main__":
    main()
