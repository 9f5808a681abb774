"""One training step, observed: its inputs are kept, its boundaries timed, its modules left alone."""

import pytest
import torch
from networks import assert_same_attributes, attributes, deep_mlp

from lightning_egeria.freezing.capture import StepCapture
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.network.prefix import FrozenPrefix


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
    evaluation = captured(net, prefix, x).evaluation()
    x.zero_()
    (call,) = evaluation.calls
    assert torch.equal(call.args[0], expected)
    assert evaluation.first == 0
    assert evaluation.network == {"": net}


@pytest.mark.parametrize(("crop", "kept"), [(True, 3), (False, 5)])
def test_only_compared_samples_are_kept_if_that_is_safe(net, prefix, crop, kept):
    evaluation = captured(net, prefix, torch.rand(5, 4), samples=3, crop=crop).evaluation()
    assert len(evaluation.calls[0].args[0]) == kept


def test_it_begins_behind_the_frozen_prefix(net, prefix):
    prefix.set_depth(1)
    capture = captured(net, prefix, torch.rand(5, 4))
    assert capture.evaluation().first == 1
    assert capture.version == prefix.version
    assert [index for index, _ in capture.timer.forward_marks] == [1, 2]


def test_the_boundaries_are_timed(net, prefix):
    capture = captured(net, prefix, torch.rand(5, 4))
    ended = capture.timer.backward_ended
    capture.backward_ended()
    assert capture.timer.backward_ended == ended  # the first of several backwards counts
    assert len(capture.timer.layer_seconds()) == 3


def test_a_step_that_does_not_call_the_network_has_no_evaluation(prefix):
    capture = StepCapture(prefix, 64, False)
    capture.start()
    capture.stop()
    assert capture.evaluation() is None


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
