"""A graph pipeline against the chain of the same stages, six processes whose work is emulated by sleeping.

A stem, four branches, and an end take 20 ms forward and 40 ms backward each. Both plans take turns in one run.

With ``--chain``, a chain of four such stages against `torch.distributed.pipelining` with its schedule 1F1B, in turn.
"""

import argparse
import dataclasses
import functools
import os
import socket
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_egeria import GraphPipeline
from lightning_egeria.methods.pipelining.timeline import predict

CHAIN = 4  # stages
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


def start(rank, port, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=120))


def in_turn(steps, count):
    """Returns the median seconds of each of some steps, in turn; the first round learns shapes."""
    measured = {name: [] for name in steps}
    for _ in range(count + 1):
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            measured[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:]) for name, values in measured.items()}


def run_chain(rank, port, seconds, micro_batches, steps):
    start(rank, port, CHAIN)
    batch, target = torch.rand(4 * micro_batches, 8), torch.zeros(4 * micro_batches, 8)
    ours, theirs = (nn.Sequential(*(Slow(seconds) for _ in range(CHAIN))) for _ in range(2))
    stages = {str(number): [str(number)] for number in range(CHAIN)}
    pipeline = GraphPipeline(ours, batch, micro_batches=micro_batches, stages=stages)
    dist.broadcast(batch, 0)
    stage = PipelineStage(theirs[rank], rank, CHAIN, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.functional.mse_loss)
    given = {"args": (batch,) if rank == 0 else (), "kwargs": {"target": target} if rank == CHAIN - 1 else {}}

    def our_step():
        ours.zero_grad()
        pipeline.step(batch, lambda output, _: output.square().mean())

    def their_step():
        theirs.zero_grad()
        schedule.step(*given["args"], **given["kwargs"])

    found = in_turn({"GraphPipeline": our_step, "Schedule1F1B": their_step}, steps)
    torch.testing.assert_close(ours[rank].weight.grad, theirs[rank].weight.grad)  # they compute the same
    if rank == 0:
        for name, value in found.items():
            print(f"{micro_batches} micro-batches, chain of {CHAIN}, {name}: {value:.3f} s a step")
        print(
            f"{micro_batches} micro-batches: {found['GraphPipeline'] / found['Schedule1F1B']:.3f} of the time of 1F1B"
        )
    dist.barrier()
    dist.destroy_process_group()


def run(rank, port, seconds, micro_batches, steps):
    start(rank, port, 6)
    batch = torch.ones(micro_batches, 8)
    settings = {"micro_batches": micro_batches, "stages": STAGES}
    graph = GraphPipeline(Net(seconds), batch, **settings)
    chain = GraphPipeline(Net(seconds), batch, **settings, plan=dataclasses.replace(graph.plan, is_chain=True))
    steps_of = {"graph": graph, "chain": chain}
    found = in_turn(
        {
            name: functools.partial(one.step, batch, lambda output, batch: output.sum())
            for name, one in steps_of.items()
        },
        steps,
    )
    if rank == 0:
        for name, pipeline in steps_of.items():
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
    parser.add_argument("--chain", action="store_true", help="compare with torch.distributed.pipelining")
    arguments = parser.parse_args()
    function, size = (run_chain, CHAIN) if arguments.chain else (run, 6)
    for micro_batches in arguments.micro_batches:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(function, (port, arguments.milliseconds / 1e3, micro_batches, arguments.steps), nprocs=size)


if __name__ == "__main__":
    main()
