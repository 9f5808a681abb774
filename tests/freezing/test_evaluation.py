"""The life of an evaluation: the captured step, and answers that are late, void, smaller or failed."""

import threading

import pytest
import torch

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.network.prefix import FrozenPrefix
from lightning_egeria.core.training.freezer import Decision
from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.evaluation import StepCapture
from support.freezing.held import Asked, Run
from support.networks import assert_same_attributes, attributes, deep_mlp

# --- the captured step ----------------------------------------------------------------------------------------------


@pytest.fixture
def net():
    return deep_mlp()


@pytest.fixture
def prefix(net):
    return FrozenPrefix(net, LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum()))


def captured(net, prefix, x, samples=64, crop=False):
    capture = StepCapture(prefix, samples, crop)
    capture.start()
    loss = net(x).sum()
    capture.stop()
    loss.backward()
    capture.backward_ended()
    return capture


def test_the_input_is_a_copy_of_that_of_the_step(net, prefix):
    x = torch.rand(5, 4)
    expected = x.clone()
    request = captured(net, prefix, x).request()
    x.zero_()
    (call,) = request.calls
    assert torch.equal(call.args[0], expected)
    assert request.first == 0
    assert request.network == {"": net}


@pytest.mark.parametrize(("crop", "kept"), [(True, 3), (False, 5)])
def test_only_compared_samples_are_kept_if_that_is_safe(net, prefix, crop, kept):
    request = captured(net, prefix, torch.rand(5, 4), samples=3, crop=crop).request()
    assert len(request.calls[0].args[0]) == kept


def test_it_begins_behind_the_frozen_prefix(net, prefix):
    prefix.set_depth(1)
    capture = captured(net, prefix, torch.rand(5, 4))
    assert capture.request().first == 1
    assert capture.version == prefix.version
    assert [index for index, _ in capture.timer.forward_marks] == [1, 2]


def test_the_boundaries_are_timed(net, prefix):
    capture = captured(net, prefix, torch.rand(5, 4))
    ended = capture.timer.backward_ended
    capture.backward_ended()
    assert capture.timer.backward_ended == ended  # the first of several backwards counts
    assert len(capture.timer.layer_seconds()) == 3


def test_a_step_that_does_not_call_the_network_sends_no_request(prefix):
    capture = StepCapture(prefix, 64, False)
    capture.start()
    capture.stop()
    assert capture.request() is None


def test_the_modules_are_left_as_they_were(net, prefix):
    before = attributes(net)
    capture = StepCapture(prefix, 64, False)
    capture.start()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.rand(5, 3))
    capture.stop()
    capture.stop()
    assert_same_attributes(before, net)


def test_what_the_loss_is_does_not_change(net, prefix):
    x = torch.rand(5, 4)
    torch.manual_seed(0)
    expected = net(x)
    net.load_state_dict(net.state_dict())
    capture = StepCapture(prefix, 2, True)
    capture.start()
    torch.manual_seed(0)
    output = net(x)
    capture.stop()
    assert torch.equal(output, expected)


def test_without_shards_no_weights_are_gathered(prefix):
    assert StepCapture(prefix, 64, False).weights is None


# --- the queue ------------------------------------------------------------------------------------------------------


def test_a_late_answer_is_dropped_and_counted():
    run = Run(Asked()).steps(5, answers=False)
    run.pool.answer()
    run.steps(5)
    # What was asked at step 2 came after step 5, and so did what was asked at step 4.
    assert list(run.policy.plasticity()) == [6, 7, 9]
    assert (run.evaluations.counts.late, run.evaluations.counts.dropped, run.evaluations.counts.done) == (1, 0, 3)
    assert run.comparison.evaluate_every_n_steps == 2


def test_an_evaluation_without_a_free_worker_is_dropped():
    run = Run(Asked())
    run.pool.busy = True
    run.steps(5)
    run.pool.busy = False
    run.steps(5)
    assert list(run.policy.plasticity()) == [7, 9]
    assert run.evaluations.counts.dropped == 2


def test_a_deterministic_run_waits_for_the_answer():
    run = Run(Asked(), wait_s=60.0).steps(3, answers=False)
    threading.Timer(0.05, run.pool.answer).start()
    run.steps(1, answers=False)
    assert list(run.policy.plasticity()) == [4]


def test_nothing_is_asked_that_a_decision_would_make_void():
    run = Run(Asked({4: Decision(1, "test")}), wait_s=60.0).steps(3).steps(1, answers=False)
    assert [event.step for event in run.events] == [4]
    assert run.pool.waiting == []  # nobody would wait for it, and its worker would not be free at step 6
    assert list(run.steps(4).policy.plasticity()) == [4, 8]


def test_waiting_ends():
    run = Run(Asked(), wait_s=0.05).steps(4, answers=False)
    assert run.evaluations.counts.failed == 1
    assert "no answer within 0.05 s" in run.told.warnings[0]


def test_after_three_failures_in_a_row_nothing_is_compared():
    run = Run(Asked())
    run.pool.fails = WorkerError("broken")
    run.steps(5)
    run.pool.fails = None
    run.steps(3)
    assert (run.evaluations.counts.failed, run.evaluations.counts.done, run.evaluations.stopped) == (2, 1, False)
    run.pool.fails = WorkerError("broken")
    run.steps(20)
    assert (run.evaluations.counts.failed, run.evaluations.stopped, run.pool.has_snapshot) == (5, True, False)
    told = run.told.warnings
    assert len(told) == 2
    assert "failed: broken" in told[0]
    assert "3 times in a row" in told[1]


def test_a_failure_that_comes_late_is_told_too():
    run = Run(Asked()).steps(4, answers=False)
    run.pool.fails = WorkerError("killed")
    run.pool.answer()
    run.pool.fails = None
    run.steps(4)
    assert run.evaluations.counts.failed == 2  # the one that was late, and the one after it
    assert run.evaluations.counts.late == 1


def test_an_answer_about_another_prefix_is_dropped():
    # Frozen after step 5: the evaluation of step 4 is on its way.
    run = Run(Asked({5: Decision(1, "test")})).steps(3).steps(2, answers=False).steps(5)
    assert list(run.policy.plasticity()) == [3, 7, 9]
    assert run.evaluations.counts.dropped == 1
    assert [(event.step, event.kind, event.depth, event.reason) for event in run.events] == [(5, "freeze", 1, "test")]


def test_plasticity_of_frozen_layer_modules_is_nan():
    run = Run(Asked({3: Decision(2, "test")})).steps(8)
    values = run.policy.plasticity()[7]
    assert [value != value for value in values] == [True, True, False]


def test_a_smaller_batch_is_an_evaluation_that_did_not_happen():
    run = Run(Asked()).steps(5).steps(1, batch_size=5).steps(4)
    assert list(run.policy.plasticity()) == [3, 5, 9]
    assert run.evaluations.counts.dropped == 1


def test_a_batch_of_one_says_nothing():
    run = Run(Asked(), batch_size=1).steps(10)
    assert run.policy.plasticity() == {}
    assert run.evaluations.counts.done == 0
