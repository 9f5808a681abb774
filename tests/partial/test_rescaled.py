"""DDP's mean over all ranks, turned into the mean over contributors."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_egeria.methods.partial.exchange import RescaledMean


def filled(value, *sizes):
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    return parameters


def test_gradients_are_multiplied_by_ranks_over_contributors():
    layers = [filled(1.0, 2), filled(1.0, 3), filled(1.0, 4, 5)]
    mean = RescaledMean(SimpleNamespace(), layers)
    mean.begin((0, 1, 2, 2))
    mean.finish()
    assert [float(layer[0].grad[0]) for layer in layers] == [4.0, 2.0, 1.0]
    mean.finish()  # once only
    assert float(layers[0][0].grad[0]) == 4.0
    mean.begin((0, 1, 2, 2))
    mean.abort()
    mean.finish()
    assert float(layers[0][0].grad[0]) == 4.0


def test_it_saves_no_bytes():
    layers = [filled(1.0, 2), filled(1.0, 3), []]
    mean = RescaledMean(SimpleNamespace(), layers)
    assert mean.received((0, 1, 1, 1), 3) == mean.received((0, 0, 0, 0), 0) == pytest.approx(2 * 3 / 4 * 20)
    layers[0][0].requires_grad_(False)  # frozen: DDP does not send it
    assert mean.received((1, 1, 1, 1), 0) == pytest.approx(2 * 3 / 4 * 12)


def test_ddp_expects_unused_parameters_until_it_is_closed():
    strategy = SimpleNamespace(_ddp_kwargs={"broadcast_buffers": False}, model=None)
    mean = RescaledMean(strategy, [])
    mean.prepare()
    mean.prepare()
    assert strategy._ddp_kwargs == {"broadcast_buffers": False, "find_unused_parameters": True}
    mean.close()
    mean.close()
    assert strategy._ddp_kwargs == {"broadcast_buffers": False}
