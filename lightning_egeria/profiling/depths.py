"""What an iteration costs by the number of layer modules that its backward goes through: time and memory."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_egeria.errors import check_integers
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.paused import PausedPrefix
from lightning_egeria.network.saved import SavedActivations
from lightning_egeria.profiling.clock import mark, reached, seconds_between
from lightning_egeria.programs.files import write_whole

SETTLING_ROUNDS = 2  # while allocators and caches settle
VERSION = 1
Mark = float | torch.cuda.Event


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

    Raises:
        ArgumentError: ``rounds`` is less than 1.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    >>> batch = torch.ones(5, 4)
    >>> costs = measure_depths(net, LayerChain.trace(net, lambda: net(batch).sum()), lambda: net(batch).sum(), rounds=1)
    >>> len(costs.backward_s), costs.bytes[0] < costs.bytes[-1]
    (2, True)
    """
    check_integers(1, rounds=rounds)
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
