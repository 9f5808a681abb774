"""Norms measured in training: known gradients, of several batches, processes and steps."""

import pytest
import torch
from torch import nn

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.goodput import gradients as module
from lightning_egeria.methods.goodput.gradients import GradientMeter
from lightning_egeria.methods.goodput.noise import GradientNoise

WIDTH, SAMPLES = 300, 4  # samples of a batch, also the initial batch size
GENERATOR = torch.Generator().manual_seed(0)
TRUE = torch.randn(WIDTH, generator=GENERATOR) * 0.5
DEVIATIONS = torch.linspace(0.1, 1.5, WIDTH)
SQUARED, VARIANCE = float(TRUE @ TRUE), float(DEVIATIONS @ DEVIATIONS) / SAMPLES


class Dot(nn.Module):
    """The gradient of its loss is the mean of the input."""

    def __init__(self):
        super().__init__()
        self.front, self.back = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(200))

    def forward(self, inputs):
        return (inputs @ torch.cat([self.front, self.back])).mean()


def batch(samples=SAMPLES):
    return TRUE + torch.randn(samples, WIDTH, generator=GENERATOR) * DEVIATIONS


def groups_of(net):
    return [{"params": [net.front]}, {"params": [net.back]}]


def run(steps, batches=1, optimizer=None, every=1, precondition=1.0):
    net = Dot()
    optimizer = optimizer(groups_of(net)) if optimizer else torch.optim.SGD(groups_of(net), lr=0.01)
    noise = GradientNoise(2)
    meter = GradientMeter(optimizer, noise, every)
    for step in range(steps):
        meter.begin(step, batches, float(batches))
        optimizer.zero_grad()
        for _ in range(batches):
            (net(batch()) / batches).backward()
            meter.batch_end()
        optimizer.step()
    meter.read()
    return noise


@pytest.mark.parametrize("batches", [2, 5])
def test_batches_of_a_step_give_an_estimate(batches):
    noise = run(600, batches)
    assert noise.estimates == 600
    assert not noise.biased
    assert noise.squared_norm == pytest.approx(SQUARED, rel=0.02)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)


def test_halves_of_a_batch_give_an_estimate():
    net = Dot()
    noise, samples = GradientNoise(2), 3 * SAMPLES
    meter = GradientMeter(torch.optim.SGD(groups_of(net), lr=0.01), noise)
    for step in range(600):
        meter.begin(step, 0, 3.0)
        halves = []
        for _ in range(2):
            net.zero_grad()
            net(batch(samples // 2)).backward()
            halves.append({parameter: parameter.grad for parameter in net.parameters()})
        meter.add_halves(*halves, 3.0, steps=1)
    meter.read()
    assert noise.estimates == 600
    assert not noise.biased
    assert noise.squared_norm == pytest.approx(SQUARED, rel=0.02)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)


def test_two_steps_give_one_that_is_marked():
    noise = run(2000)
    assert noise.estimates == 1000
    assert noise.biased
    assert noise.squared_norm == pytest.approx(SQUARED, rel=0.02)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)


@pytest.mark.parametrize(("replicas", "batches"), [(2, 1), (8, 1), (3, 2)])
def test_gradients_of_processes_give_an_estimate(replicas, batches, monkeypatch):
    """One process is measured; what the others would add to the sum is computed by hand."""
    net, noise = Dot(), GradientNoise(2)
    meter = GradientMeter(torch.optim.SGD(groups_of(net), lr=0.0), noise, replicas=replicas)
    others = torch.zeros(2)
    monkeypatch.setattr(module.dist, "all_reduce", lambda tensor: tensor.add_(others))
    for step in range(800):
        rounds = torch.stack([torch.stack([batch().mean(0) for _ in range(batches)]) for _ in range(replicas)])
        parts = rounds[1:].flatten(0, 1) / batches
        others = torch.stack([parts[:, :100].square().sum(), parts[:, 100:].square().sum()])
        meter.begin(step, batches, float(replicas * batches))
        for number in range(batches):
            net.zero_grad(set_to_none=number == 0)
            seen = rounds[0, : number + 1].sum(0) / batches
            if number == batches - 1:  # in two buckets
                meter.exchanged_bucket([net.back], [seen[100:].clone()])
                meter.exchanged_bucket([net.front, nn.Parameter(torch.ones(2))], [seen[:100].clone(), torch.ones(2)])
                seen = rounds.mean((0, 1))
            net.front.grad, net.back.grad = seen[:100].clone(), seen[100:].clone()
            meter.batch_end()
    meter.read()
    assert noise.estimates == 800
    assert noise.squared_norm == pytest.approx(SQUARED, rel=0.02)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)


def test_adam_has_the_noise_of_its_steps():
    # Second moments: |true|^2 + variance of the gradient, the same from the first step on in expectation.
    noise = run(1200, 2, lambda groups: torch.optim.Adam(groups, lr=1e-3, betas=(0.9, 0.999)))
    moments = TRUE.square() + DEVIATIONS.square() / (2 * SAMPLES)
    assert noise.squared_norm == pytest.approx(float((TRUE.square() / moments).sum()), rel=0.03)
    expected = float((DEVIATIONS.square() / SAMPLES / moments).sum())
    assert noise.variance == pytest.approx(expected, rel=0.03)
    assert noise.estimates == 1195  # begins again when second moments are there


def test_every_so_many_steps():
    assert run(12, 2, every=3).estimates == 4
    assert run(12, every=3).estimates == 2  # pairs


def test_loss_scales_are_taken_out():
    noises = []
    for factor in (1.0, 1024.0):
        torch.manual_seed(0)
        net, noise = Dot(), GradientNoise(2)
        meter = GradientMeter(torch.optim.SGD(groups_of(net), lr=0.0), noise, loss_scale=lambda factor=factor: factor)
        inputs = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        for step in range(4):
            meter.begin(step, 1, 1.0)
            net.zero_grad()
            (net(inputs[step]) * factor).backward()
            meter.batch_end()
        meter.read()
        noises.append(noise)
    assert noises[0].squared_norm == pytest.approx(noises[1].squared_norm)
    assert noises[0].variance == pytest.approx(noises[1].variance)


def test_frozen_parameters_count_nothing():
    net, noise = Dot(), GradientNoise(2)
    meter = GradientMeter(torch.optim.SGD(groups_of(net), lr=0.0), noise)
    net.front.requires_grad_(False)
    for step in range(2):
        meter.begin(step, 1, 1.0)
        net(batch()).backward()
        meter.batch_end()
    meter.read()
    assert noise.gains(2.0)[0] == 1.0
    assert noise.gains(2.0)[1] > 1.0
    meter.forget()
    assert not noise.known


def test_a_dropped_pair_and_no_gradients():
    net, noise = Dot(), GradientNoise(2)
    meter = GradientMeter(torch.optim.SGD(groups_of(net), lr=0.0), noise)
    for step in range(4):
        meter.begin(step, 1, 1.0)
        if step != 2:
            net(batch()).backward()
        meter.batch_end()
        if step == 0:
            meter.drop_pair()
        net.zero_grad()
    meter.read()
    assert not noise.known


def test_sparse_gradients_are_refused():
    net = nn.Embedding(3, 2, sparse=True)
    meter = GradientMeter(torch.optim.SGD(net.parameters(), lr=0.1), GradientNoise(1))
    meter.begin(0, 1, 1.0)
    net(torch.tensor([0])).sum().backward()
    with pytest.raises(UnsupportedError, match="a parameter has a sparse gradient"):
        meter.batch_end()


def test_parameters_that_are_added_start_it_again():
    net, noise = Dot(), GradientNoise(1)
    optimizer = torch.optim.SGD([net.front], lr=0.01)
    meter = GradientMeter(optimizer, noise)
    for step in range(8):
        if step == 5:  # as a callback for fine-tuning does
            optimizer.add_param_group({"params": [net.back]})
        meter.begin(step, 1, 1.0)
        optimizer.zero_grad()
        net(batch()).backward()
        meter.batch_end()
        optimizer.step()
    meter.read()
    assert noise.estimates == 1  # of steps 6 and 7
    assert noise.gains(2.0).shape == (2,)


def test_half_a_pair_is_part_of_the_state():
    nets = Dot(), Dot()
    first, second = (GradientMeter(torch.optim.SGD(net.parameters(), lr=0.01), GradientNoise(1)) for net in nets)

    def step(meter, net, number, value):
        meter.begin(number, 1, 1.0)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, value)
        meter.batch_end()

    step(first, nets[0], 0, 1.0)
    state = first.state()
    assert [tuple(one.shape) for one in state["kept"]] == [(100,), (200,)]
    second.load(state)
    for meter, net in ((first, nets[0]), (second, nets[1])):
        step(meter, net, 1, 3.0)
        assert meter.state()["pair"] is None
    assert first.noise.state() == second.noise.state()
    assert first.noise.estimates == 1
