"""What a step costs at each depth, and which share of it each layer module has."""

import time

import pytest
import torch
from torch import nn

from lightning_egeria.core import profiling
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.profiling.costs import (
    BATCHES_MEASURED,
    LAYERS_MEASURED,
    WARM_UP_STEPS,
    BoundaryTimer,
    StepCosts,
)
from support.networks import assert_same_attributes, attributes, deep_mlp


def add(costs, depth, seconds, steps, evaluated=False):
    for _ in range(steps):
        costs.add(depth=depth, seconds=seconds, evaluated=evaluated)


class TestStepCosts:
    def test_nothing_measured_is_none(self):
        costs = StepCosts()
        assert costs.median_seconds(0) is None
        assert costs.seconds_saved() is None
        assert costs.layer_shares(2) == [None, None]
        assert costs.evaluation_seconds == 0

    def test_the_first_steps_count_where_there_are_no_others(self):
        costs = StepCosts()
        assert costs.median_seconds(0) is None
        add(costs, 0, 100.0, WARM_UP_STEPS)
        assert costs.median_seconds(0) == 100.0
        add(costs, 0, 2.0, 2)
        assert costs.median_seconds(0) == 2.0

    def test_the_first_steps_after_a_change_of_depth_do_not_count(self):
        costs = StepCosts()
        add(costs, 0, 2.0, WARM_UP_STEPS + 1)
        add(costs, 1, 50.0, WARM_UP_STEPS)
        add(costs, 1, 1.0, 4)
        add(costs, 0, 70.0, WARM_UP_STEPS)
        assert (costs.median_seconds(0), costs.median_seconds(1)) == (2.0, 1.0)

    def test_a_freeze_at_once_leaves_a_batch_to_compare_with(self):
        costs = StepCosts()
        add(costs, 0, 90.0, 1)
        add(costs, 0, 3.0, 1)
        add(costs, 1, 1.0, WARM_UP_STEPS + 2)
        assert costs.median_seconds(0) == 3.0
        assert costs.seconds_saved() == 2.0 * (WARM_UP_STEPS + 2)

    def test_a_machine_that_was_busy_in_that_batch_does_not_count(self):
        costs = StepCosts()
        costs.add(0, 30.0, False, cpu_seconds=3.0)
        for _ in range(WARM_UP_STEPS + 3):
            costs.add(1, 1.1, False, cpu_seconds=1.0)
        assert costs.median_seconds(0) == pytest.approx(3.3)

    def test_a_compilation_does_not_move_the_median(self):
        costs = StepCosts()
        add(costs, 0, 2.0, WARM_UP_STEPS + 3)
        add(costs, 0, 1000.0, 2)
        assert costs.median_seconds(0) == 2.0

    def test_only_the_newest_batches_of_a_depth_count(self):
        costs = StepCosts()
        add(costs, 0, 9.0, WARM_UP_STEPS + BATCHES_MEASURED)
        add(costs, 0, 2.0, BATCHES_MEASURED)
        assert costs.median_seconds(0) == 2.0

    def test_steps_with_an_evaluation_do_not_count(self):
        costs = StepCosts()
        add(costs, 0, 2.0, WARM_UP_STEPS + 2)
        add(costs, 0, 30.0, 5, evaluated=True)
        assert costs.median_seconds(0) == 2.0

    def test_batches_count_once_the_device_has_done_them(self, monkeypatch):
        moments, reached = iter(float(number) for number in range(100)), set()
        monkeypatch.setattr(profiling.costs, "mark", lambda device: next(moments))
        monkeypatch.setattr(profiling.costs, "reached", lambda moment: moment in reached)
        costs, device = StepCosts(), torch.device("cpu")
        for _ in range(WARM_UP_STEPS + 1):
            costs.batch_start(device)
            costs.batch_end(device, depth=0, evaluated=False)
        assert costs.median_seconds(0) is None
        reached.update(range(100))
        costs.batch_start(device)
        next(moments)
        costs.batch_end(device, depth=0, evaluated=True)
        assert costs.median_seconds(0) == 1.0

    def test_an_end_without_a_start_counts_nothing(self):
        costs = StepCosts()
        for _ in range(WARM_UP_STEPS + 2):
            costs.batch_end(torch.device("cpu"), depth=0, evaluated=False)
        assert costs.median_seconds(0) is None

    def test_saved_seconds_are_those_of_all_steps_at_a_depth(self):
        costs = StepCosts()
        add(costs, 0, 4.0, 10)
        add(costs, 1, 3.0, 10)
        add(costs, 2, 1.0, 20, evaluated=False)
        add(costs, 2, 9.0, 5, evaluated=True)
        assert costs.seconds_saved() == 10 * 1.0 + 25 * 3.0

    def test_a_depth_without_a_measured_step_saves_nothing(self):
        costs = StepCosts()
        add(costs, 0, 4.0, 10)
        add(costs, 1, 1.0, WARM_UP_STEPS)
        assert costs.seconds_saved() == 0

    def test_a_deeper_prefix_that_is_slower_counts_against(self):
        costs = StepCosts()
        add(costs, 0, 4.0, 10)
        add(costs, 1, 5.0, 10)
        assert costs.seconds_saved() == -10.0

    def test_shares_are_medians_over_the_median_step(self):
        costs = StepCosts()
        add(costs, 0, 10.0, WARM_UP_STEPS + 1)
        for seconds in ([1.0, 4.0], [2.0, 2.0], [90.0, 3.0]):
            costs.add_layer_seconds(seconds)
        assert costs.layer_shares(2) == [0.2, 0.3]

    def test_shares_are_of_the_newest_measurements(self):
        costs = StepCosts()
        add(costs, 0, 10.0, WARM_UP_STEPS + 1)
        for seconds in (5.0, 1.0):
            for _ in range(LAYERS_MEASURED):
                costs.add_layer_seconds([seconds])
        assert costs.layer_shares(1) == [0.1]

    def test_shares_never_make_more_than_the_whole(self):
        costs = StepCosts()
        add(costs, 0, 1.0, WARM_UP_STEPS + 1)
        costs.add_layer_seconds([3.0, 1.0])
        assert costs.layer_shares(2) == [0.75, 0.25]

    def test_evaluation_time_adds_up(self):
        costs = StepCosts()
        for _ in range(2):
            with costs.evaluating():
                time.sleep(0.01)
        assert 0.02 <= costs.evaluation_seconds < 5


class Slow(nn.Module):
    """Takes time on both ways."""

    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        output = self.linear(x)
        output.register_hook(lambda gradient: time.sleep(self.seconds))
        return output


class TestBoundaryTimer:
    @pytest.fixture
    def net(self):
        return nn.Sequential(Slow(0.005), Slow(0.02), Slow(0.0), nn.Linear(4, 2))

    @staticmethod
    def timed_step(net, chain, first=0):
        timer = BoundaryTimer(dict(net.named_modules()), chain, first)
        timer.start()
        timer.began = time.perf_counter()
        loss = net(torch.rand(3, 4)).sum()
        loss.backward()
        timer.backward_ended = time.perf_counter()
        timer.stop()
        return timer

    @pytest.fixture
    def chain(self, net):
        return LayerChain.trace(net, lambda: net(torch.rand(3, 4)).sum(), ["0", "1", "2"])

    def test_time_is_given_to_the_layer_module_that_took_it(self, net, chain):
        timer = self.timed_step(net, chain)
        first, second, third = timer.layer_seconds()
        assert timer.timed
        # What a layer module's hook takes in the backward comes before its own mark, and counts for the one behind it.
        assert 0.005 <= first < second
        assert second >= 0.02
        assert 0 < third < 5

    def test_all_calls_of_a_siamese_network_count(self, net, chain):
        once = self.timed_step(net, chain).layer_seconds()
        step = net.forward
        net.forward = lambda x: step(x) + step(x + 1)
        seconds = self.timed_step(net, chain).layer_seconds()
        assert seconds[1] >= 2 * 0.02
        assert 2 * 0.005 <= seconds[0] < seconds[1]
        assert once[1] < seconds[1]

    def test_a_step_without_a_backward_has_no_times(self, net, chain):
        timer = BoundaryTimer(dict(net.named_modules()), chain, 0)
        timer.start()
        timer.began = time.perf_counter()
        net(torch.rand(3, 4))
        timer.stop()
        assert timer.layer_seconds() is None
        timer.backward_ended = time.perf_counter()
        assert timer.layer_seconds() is None

    def test_a_timer_that_leaves_out_the_front_has_no_times(self, net, chain):
        assert self.timed_step(net, chain, first=1).layer_seconds() is None

    def test_it_leaves_the_modules_as_they_were(self):
        net = deep_mlp()
        chain = LayerChain.trace(net, lambda: net(torch.rand(3, 4)).sum())
        before = attributes(net)
        timer = self.timed_step(net, chain)
        assert_same_attributes(before, net)
        assert len(timer.layer_seconds()) == 3
