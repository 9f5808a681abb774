"""What an iteration costs by depth, as the benchmark of the cluster simulator measures it."""

import json

import torch
from torch import nn

from benchmarks.iteration_costs import SETTLING_ROUNDS, VERSION, measure_depths
from benchmarks.scheduling.iterations import IterationCost
from lightning_egeria.core.network.chain import LayerChain

ROWS, WIDTH = 5, 4


def network():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)), nn.Linear(WIDTH, 2))
    batch = torch.ones(ROWS, WIDTH)
    chain = LayerChain.trace(net, lambda: net(batch).sum(), ["0", "1", "2", "3"])
    return net, chain, lambda: net(batch).sum()


def test_each_depth_goes_back_through_its_layer_modules():
    net, chain, loss = network()
    learnt = []

    def update():
        learnt.append([parameter.grad is not None for parameter in net.parameters()])

    before = [parameter.clone() for parameter in net.parameters()]
    measure_depths(net, chain, loss, update, rounds=1)
    suffixes = [[False] * (8 - 2 * depth) + [True] * (2 * depth) for depth in (1, 2, 3, 4)]
    assert learnt == suffixes * (1 + SETTLING_ROUNDS)
    assert all(map(torch.equal, before, net.parameters()))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())


def test_memory_by_hand():
    net, chain, loss = network()
    found = measure_depths(net, chain, loss, rounds=1).bytes
    weights, layer, head = 3 * (WIDTH * WIDTH + WIDTH) + 2 * WIDTH + 2, WIDTH * WIDTH + WIDTH, 2 * WIDTH + 2
    activation = ROWS * WIDTH  # the input of a layer, which is the output of the ReLU in front of it
    numbers = [weights + head + activation + depth * (layer + activation) for depth in range(4)]
    assert found == tuple(4 * number for number in numbers)


def test_the_cluster_reads_what_is_written(tmp_path):
    net, chain, loss = network()
    seconds = iter([float(tick) ** 2 for tick in range(1000)])
    costs = measure_depths(net, chain, loss, rounds=2, now=lambda device: next(seconds))
    costs.write(tmp_path / "costs.json")
    read = IterationCost.read(tmp_path / "costs.json", device_bytes=2 * costs.bytes[-1])
    assert read.depths == 4
    assert read.memory[-1] == 0.5
    assert read.full_s == costs.forward_s[-1] + costs.backward_s[-1]
    assert json.loads((tmp_path / "costs.json").read_text())["version"] == VERSION
