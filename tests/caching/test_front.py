"""Sequences of frozen layers are recorded as one call, and as calls of their layers where somebody looks inside."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from fronts import Batch, new_front
from torch import nn

from lightning_egeria.lazy.keys import Keys

X = torch.randn(6, 8)
OUTPUT = torch.randn(6, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Stages(nn.Module):
    """Four blocks in two sequences, which are one in the other if ``nested``, and two that learn."""

    def __init__(self, nested=False):
        super().__init__()
        torch.manual_seed(0)
        inner = [nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())]
        self.first = nn.Sequential(*inner) if nested else nn.Sequential(*inner[0], *inner[1])
        self.last = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.last(self.first(x)))


class Run:
    """A network with a front, and batches of the same kind."""

    def __init__(self, nested=False, depth=4):
        self.net, self.keys = Stages(nested).eval(), Keys()
        self.front = new_front(depth, self.net)

    def step(self, output=None, **options):
        batch = Batch(self.front, output, inputs=X, keys=self.keys, **options)
        batch.result = self.net(batch.source.batch())
        return batch


@pytest.fixture(params=[False, True], ids=["flat", "nested"])
def run(request):
    made = Run(request.param)
    for _ in range(2):  # the first call shows what the output looks like, the second one is recorded
        assert made.step().boundaries == [1, 2, 3, 4]
    yield made
    made.front.end()


def test_a_sequence_is_recorded_as_one_call(run):
    apart, whole = run.step(reads=[SimpleNamespace(level=SimpleNamespace(depth=3))]), run.step()
    assert 3 in apart.boundaries
    assert whole.boundaries == [4]
    assert apart.keys[-1] == whole.keys[-1]  # it stands for the same computation
    assert whole.result.equal(apart.result)
    assert whole.result.equal(Stages.forward(copy.deepcopy(run.net), X))


def test_a_known_output_takes_its_place(run):
    run.front.ran.clear()
    batch = run.step(OUTPUT)
    assert batch.result.equal(run.net.head(run.net.last(OUTPUT)))
    assert (batch.source.loaded, run.front.ran) == ([], set())


def test_an_unknown_output_is_computed_by_all_layers(run):
    run.front.ran.clear()
    run.step()
    assert run.front.ran == {0, 1, 2, 3}


def test_a_sequence_in_front_of_the_boundary_is_one_too():
    run = Run(depth=5)  # and one layer of the next
    for _ in range(3):
        batch = run.step()
    assert batch.boundaries == [4, 5]
    run.front.end()


@pytest.fixture
def part():
    """The first three layers of four."""
    made = Run(depth=3)
    for _ in range(2):
        assert made.step().boundaries == [1, 2, 3]
    yield made
    made.front.end()


def test_the_layers_that_a_sequence_begins_with_are_one_call(part):
    batch = part.step(OUTPUT)
    assert batch.boundaries == [3]
    assert batch.result.equal(part.net.head(part.net.last(part.net.first[3](OUTPUT))))
    assert part.step().result.equal(Stages.forward(copy.deepcopy(part.net), X))


def test_the_layers_behind_them_learn_and_are_watched(part):
    behind, seen = part.net.first[3], []
    handle = behind.register_forward_hook(lambda *call: seen.append(call))
    batch = part.step(OUTPUT)
    batch.result.sum().backward()
    handle.remove()
    assert batch.boundaries == [3]
    assert len(seen) == 1
    assert behind.linear.weight.grad is not None


def test_a_layer_behind_them_that_is_replaced_is_called(part):
    part.net.first[3] = nn.Threshold(1e9, 0.5)
    assert part.step().result.equal(part.net.head(part.net.last(torch.full((6, 8), 0.5))))


def inner(run):
    return next(module for module in reversed(list(run.net.first.modules())) if isinstance(module, Block))


def test_hooks_inside_see_what_they_saw(run):
    seen = []
    handle = inner(run).register_forward_hook(lambda module, args, out: seen.append((args[0].clone(), out.clone())))
    assert 3 in run.step().boundaries
    run.front.end()
    run.net(X)
    assert all(one.equal(other) for one, other in zip(*seen, strict=True))
    handle.remove()


def test_a_layer_in_another_mode_is_another_call(run):
    inner(run).training = True
    assert 3 in run.step().boundaries
    inner(run).training = False
    assert run.step().boundaries == [4]


def test_a_layer_that_trains_after_all_runs(run):
    inner(run).linear.weight.requires_grad_()
    run.step().result.sum().backward()
    assert inner(run).linear.weight.grad is not None


def test_replaced_layers_are_called(run):
    block = inner(run)
    own = vars(block)["forward"]
    vars(block)["forward"] = lambda x: own(x) * 0
    assert 3 in run.step().boundaries
    expected = run.net.head(run.net.last(torch.zeros(6, 8)))
    assert run.step().result.equal(expected)


def test_layers_that_are_appended_are_called(run):
    run.net.first.append(nn.Threshold(1e9, 0.5))
    assert run.step().result.equal(run.net.head(run.net.last(torch.full((6, 8), 0.5))))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_its_own_layers(run, make):
    other = make(run.net)
    block = next(module for module in other.first.modules() if isinstance(module, Block))
    nn.init.zeros_(block.linear.weight)
    assert not other(X).equal(run.net(X))


def test_close_leaves_the_sequences_as_they_were(run):
    run.front.end()
    assert not any("forward" in vars(module) for module in run.net.modules())
