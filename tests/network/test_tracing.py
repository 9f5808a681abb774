"""What a trace sees, and that it leaves nothing behind."""

import concurrent.futures

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.tracing import StepTrace, leaf_of, walk
from support.networks import assert_same_attributes, attributes


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), nn.Linear(3, 2))


class TestStepTrace:
    def test_calls_in_completion_order_with_their_tree(self):
        net = network()
        trace = StepTrace(net)
        trace.start()
        net(torch.rand(2, 4))
        trace.stop()
        assert [call.path for call in trace.calls] == ["0", "1.0", "1.1", "1", "2", ""]
        assert [call.end for call in trace.calls] == list(range(6))
        tree = {call.path: [child.path for child in call.children] for call in trace.calls}
        assert tree == {"0": [], "1.0": [], "1.1": [], "1": ["1.0", "1.1"], "2": [], "": ["0", "1", "2"]}
        assert [call.parent.path if call.parent else None for call in trace.calls] == ["", "1", "1", "", "", None]

    def test_every_call_of_a_step(self):
        net = network()
        trace = StepTrace(net)
        trace.start()
        net[0](torch.rand(2, 4))
        net[0].forward(torch.rand(2, 4))
        with torch.no_grad():
            net(torch.rand(2, 4))
        trace.stop()
        assert [call.path for call in trace.roots] == ["0", "0", ""]
        assert [len(call.nodes) for call in trace.roots] == [1, 1, 0]

    def test_one_node_per_tensor_of_the_output(self):
        class Two(nn.Module):
            def forward(self, x):
                return {"a": x * 2, "b": [x.detach(), (x * 3, 4)]}

        net = Two()
        trace = StepTrace(net)
        trace.start()
        net(torch.ones(2, requires_grad=True))
        trace.stop()
        (call,) = trace.calls
        assert [node is None for node in call.outputs] == [False, True, False]
        assert len(call.nodes) == 2

    def test_leaves_every_module_as_it_was(self):
        net = network()
        net[2].forward = net[2].forward
        before = attributes(net)
        trace = StepTrace(net)
        trace.start()
        net(torch.rand(2, 4))
        trace.stop()
        trace.stop()
        assert_same_attributes(before, net)

    def test_also_when_the_forward_raises(self):
        net = network()
        before = attributes(net)
        trace = StepTrace(net)
        trace.start()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.rand(2, 5))
        # The calls that broke off are gone, so the next one is a root again.
        net(torch.rand(2, 4))
        trace.stop()
        assert [call.path for call in trace.roots] == [""]
        assert_same_attributes(before, net)

    def test_the_output_is_the_same_with_and_without(self):
        net, x = network(), torch.rand(2, 4)
        expected = net(x)
        trace = StepTrace(net)
        trace.start()
        output = net(x)
        trace.stop()
        assert torch.equal(output, expected)

    def test_a_module_registered_twice_is_called_once(self):
        net = network()
        holder = nn.ModuleDict({"first": net, "second": net})
        trace = StepTrace(holder)
        trace.start()
        net(torch.rand(2, 4))
        trace.stop()
        assert [call.path for call in trace.roots] == ["first"]
        assert len(trace.calls) == 6


class TestGraph:
    def test_walk_touches_each_node_once(self):
        net = network()
        first = net[0](torch.rand(2, 4))
        output = net[2](net[1](first))
        visited = set()
        front = walk([first.grad_fn], visited)
        assert {id(leaf_of(node)) for node in front} - {id(None)} == {id(p) for p in net[0].parameters()}
        back = walk([output.grad_fn], visited)
        assert {id(leaf_of(node)) for node in back} - {id(None)} == {
            id(p) for part in (net[1], net[2]) for p in part.parameters()
        }
        assert not set(front) & set(back)
        assert visited == set(front) | set(back)
        assert walk([output.grad_fn], visited) == []

    def test_walk_survives_a_deep_graph(self):
        value = torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            value = value + 1
        assert len(walk([value.grad_fn], set())) == 20_001

    def test_leaf_of(self):
        weight = nn.Parameter(torch.ones(2))
        assert leaf_of((weight * 2).grad_fn) is None
        assert leaf_of((weight * 2).grad_fn.next_functions[0][0]) is weight
        # What autocast makes of a weight counts as the weight; any other cast of an activation does not.
        assert leaf_of(weight.to(torch.bfloat16).grad_fn) is weight
        assert leaf_of((weight * 2).to(torch.bfloat16).grad_fn) is None


def test_calls_of_another_thread_are_apart():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    trace = StepTrace(net)
    trace.start()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        net[0].forward, own = lambda x: pool.submit(net[1], x).result() + own(x), net[0].forward
        net(torch.ones(1, 2))
    trace.stop()
    assert [(call.path, call.parent and call.parent.path) for call in trace.calls] == [
        ("1", None),
        ("0", ""),
        ("1", ""),
        ("", None),
    ]
