"""Frozen layers are recorded, and left out where their output is known."""

import concurrent.futures
import copy
import functools
import pickle

import pytest
import torch
from fronts import Batch as BatchOf
from fronts import new_front
from lazies import is_lazy
from programs.parts import Net
from torch import nn

from lightning_egeria.errors import CacheError
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.tensors import plain
from lightning_egeria.lazy.units import precision_of

X = torch.randn(6, 8)
OUTPUT = torch.randn(6, 8)
Batch = functools.partial(BatchOf, inputs=X, keys=Keys())


@pytest.fixture
def front():
    made = new_front()
    yield made
    made.end()


def net_of(front):
    return front.prefix.module


def behind(net, hidden):
    return net.head(net.c[2](net.c[0](hidden)))


def test_known_output_takes_the_place_of_the_front(front):
    batch = Batch(front, OUTPUT)
    net = net_of(front).eval()
    net(batch.source.batch())  # the first call of each module shows what its output looks like
    front.ran.clear()
    batch = Batch(front, OUTPUT)
    assert net(batch.source.batch()).equal(behind(net, OUTPUT))
    assert front.ran == set()
    assert batch.source.loaded == []
    assert (batch.boundaries, batch.entered) == ([1, 2], True)


@pytest.mark.parametrize("times", [1, 2])
def test_unknown_output_is_computed(front, times):
    net = net_of(front).eval()
    for _ in range(times):
        batch = Batch(front)
        found = net(batch.source.batch())
    front.end()
    assert found.equal(net(X))
    assert batch.computed[0].equal(net.b(net.a(X)))


@pytest.mark.parametrize("read", [lambda x: x.mean(), lambda x: x.numpy().copy(), torch.Tensor.tolist])
def test_inner_activation_that_is_read_is_computed(front, read):
    net = net_of(front)
    expected = net.a(X)
    for _ in range(2):
        batch = Batch(front, OUTPUT)
        inner = net.a(batch.source.batch())
        net.b(inner)
    assert is_lazy(inner)
    assert torch.as_tensor(read(inner)).equal(torch.as_tensor(read(expected)))
    assert 0 in front.ran


def test_plain_tensor_is_not_recorded(front):
    net = net_of(front).eval()
    batch = Batch(front, OUTPUT)
    assert net(X).equal(net(X))
    assert batch.boundaries == []


def test_tensor_that_the_program_made_is_recorded_if_allowed(front):
    batch = Batch(front, OUTPUT, outside=True)
    net = net_of(front).eval()
    assert net(X).equal(behind(net, OUTPUT))
    assert batch.boundaries == [1, 2]


def test_a_large_tensor_that_layers_are_given_must_not_change(front, monkeypatch):
    monkeypatch.setattr("lightning_egeria.lazy.meta.MOST_BYTES", 0)
    net, x = net_of(front).eval(), X.clone()
    for _ in range(2):
        Batch(front, OUTPUT, outside=True)
        inner = net.a(x)
    x.fill_(100)
    with pytest.raises(CacheError, match=r"shape \(6, 8\) changed in place after .* Leave out FrozenPrefixCache"):
        plain(inner)


def test_tensors_of_another_thread_are_not_recorded(front):
    net = net_of(front).eval()
    expected = net(X)
    batch = Batch(front, OUTPUT, outside=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(net, X).result().equal(expected)
    assert batch.boundaries == []


def test_without_a_batch_modules_run(front):
    net = net_of(front).eval()
    expected = net(X)
    Batch(front, OUTPUT)
    front.end()
    assert net(X).equal(expected)
    assert not front.ran


HOOKS = {
    "forward": lambda part, seen: part.register_forward_hook(lambda module, args, out: seen.append(out.clone())),
    "before": lambda part, seen: part.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone())),
    "all": lambda part, seen: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(out.clone()) if module is part else None
    ),
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("part", [lambda net: net.a, lambda net: net.b, lambda net: net.b[0]])
def test_hooks_are_called_with_true_values(front, hook, part):
    net, found = net_of(front).eval(), []
    for make in (lambda: X, lambda: Batch(front).source.batch(), lambda: Batch(front).source.batch()):
        seen = []
        handle = hook(part(net), seen)
        net(make())
        handle.remove()
        found.append([plain(one).tolist() for one in seen])
    assert found[0]
    assert found[0] == found[1] == found[2]


def test_gradient_of_the_input_is_computed(front):
    net, gradients = net_of(front).eval(), []
    for make in (X.clone, lambda: Batch(front, OUTPUT).source.batch()):
        x = make().requires_grad_()
        gradients.append(torch.autograd.grad(net(x).sum(), x)[0])
    assert gradients[0].equal(gradients[1])


def test_keys_tell_inputs_and_modes_apart(front):
    net = net_of(front)

    def key_of(change=lambda x: x, context=torch.enable_grad):
        batch, nodes = Batch(front), []
        batch.boundary = lambda depth, node: nodes.append(node.key) or OUTPUT
        with context():
            net(change(batch.source.batch()))
        return nodes[-1]

    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    kinds = [{}, {"context": torch.no_grad}, {"context": autocast}]
    kinds += [{"change": lambda x: x * 2}, {"change": lambda x: x.flip(1)}]
    keys = [key_of(**kind) for kind in kinds]
    assert len(set(keys)) == len(keys)
    assert [key_of(**kind) for kind in kinds] == keys


def test_recorded_modules_run_in_the_modes_of_their_call(front):
    net = net_of(front)
    found = []
    for _ in range(2):
        batch = Batch(front, OUTPUT)
        with torch.autocast("cpu", torch.bfloat16):
            inner = net.a[0](X), net.a(batch.source.batch())
        found.append(plain(inner[1]))
    front.end()
    with torch.autocast("cpu", torch.bfloat16):
        assert found[1].equal(net.a(X))


def test_the_precision_of_an_output_is_that_of_autocast(front):
    def nodes(enabled):
        batch, found = Batch(front), []
        batch.boundary = lambda depth, node: found.append(node)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            net_of(front)(batch.source.batch())
        return found

    assert {precision_of(node) for node in nodes(True)} == {torch.bfloat16}
    assert {precision_of(node) for node in nodes(False)} == {torch.float32}


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copy_of_the_model_has_its_own_forward(front, make):
    net = net_of(front).eval()
    other = make(net)
    Batch(front, OUTPUT)
    with torch.no_grad():
        other.a[0].weight.zero_()
    front.end()
    expected = copy.deepcopy(net)
    with torch.no_grad():
        expected.a[0].weight.zero_()
    assert other(X).equal(expected(X))


def test_the_model_is_changed_only_while_a_batch_runs():
    net = Net()
    front = new_front(net=net)
    assert not any("forward" in vars(part) for part in net.modules())
    Batch(front)
    assert any("forward" in vars(part) for part in net.modules())
    front.end()
    front.end()
    assert not any("forward" in vars(part) for part in net.modules())


def test_own_forward_of_a_module_is_kept():
    net = Net()
    own = net.a.forward
    net.a.forward = own
    front = new_front(net=net)
    Batch(front)
    front.end()
    assert vars(net.a)["forward"] is own
