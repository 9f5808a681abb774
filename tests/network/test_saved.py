"""The bytes that autograd keeps, against what the operations are known to save."""

import torch
from torch import nn

from lightning_egeria.core.network.saved import SavedActivations


def saved_by(net, *inputs):
    saved = SavedActivations(net.parameters())
    saved.start()
    loss = net(*inputs).sum()
    saved.stop()
    loss.backward()
    return saved.nbytes


def test_only_the_suffix_saves_activations():
    net = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU())))
    whole = saved_by(net, torch.ones(16, 8))
    assert whole == 4 * 16 * 8 * 4  # the input, and the output of each ReLU
    net[0].requires_grad_(False)
    assert saved_by(net, torch.ones(16, 8)) == whole - 4 * 16 * 8
    net[2].requires_grad_(False)
    assert saved_by(net, torch.ones(16, 8)) == whole - 2 * 4 * 16 * 8


def test_gradients_are_those_without_counting():
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(3, 4)
    torch.manual_seed(1)
    saved_by(net, inputs)
    counted = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    torch.manual_seed(1)
    net(inputs).sum().backward()
    assert all(torch.equal(p.grad, other) for p, other in zip(net.parameters(), counted, strict=True))


def test_a_gradient_of_a_gradient_is_right():
    weight = nn.Parameter(torch.tensor([3.0]))
    saved = SavedActivations([])
    saved.start()
    loss = weight**3
    saved.stop()
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    first.backward()
    assert float(weight.grad) == 18.0


class Wrapper(torch.Tensor):
    """Has no memory of its own, as a lazy tensor."""

    @staticmethod
    def __new__(cls, value):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)
        wrapper.value = value
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [arg.value if isinstance(arg, Wrapper) else arg for arg in args]
        return func(*args, **(kwargs or {}))


def test_a_tensor_without_memory_counts_nothing():
    weight = torch.ones(4, requires_grad=True)
    saved = SavedActivations([weight])
    saved.start()
    (weight * Wrapper(torch.ones(4))).sum()
    saved.stop()
    assert saved.nbytes == 0
