"""Calls of the network are kept so that they can be made again."""

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.calls import (
    CallRecorder,
    EarlierOutput,
    NetworkCall,
    boundary_activation,
    crop_calls,
)
from support.networks import assert_same_attributes, attributes


class Pair(nn.Module):
    """An encoder and a decoder that a training step calls one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Bilinear(4, 4, 2)


def recorder_of(net, entries=("encoder", "decoder"), **arguments):
    return CallRecorder(dict(net.named_modules()), entries, torch.clone, **arguments)


def test_arguments_are_copies_of_those_of_the_call():
    net = Pair()
    recorder = recorder_of(net)
    recorder.start()
    x = torch.rand(3, 4)
    expected = x.clone()
    net.encoder(input=x)
    x.zero_()
    recorder.stop()
    (call,) = recorder.calls
    assert (call.entry, call.args, call.kwargs.keys()) == ("encoder", (), {"input"})
    assert torch.equal(call.kwargs["input"], expected)


def test_an_output_handed_on_is_kept_as_its_place():
    net = Pair()
    recorder = recorder_of(net)
    recorder.start()
    memory = net.encoder(torch.rand(3, 4))
    net.decoder(memory, torch.rand(3, 4))
    recorder.stop()
    first, second = recorder.calls
    assert first.entry == "encoder"
    assert second.args[0] == EarlierOutput(call=0, leaf=0)
    assert isinstance(second.args[1], torch.Tensor)


def test_an_output_that_was_changed_on_the_way_is_a_tensor():
    net = Pair()
    recorder = recorder_of(net)
    recorder.start()
    net.decoder(net.encoder(torch.rand(3, 4)) * 2, torch.rand(3, 4))
    recorder.stop()
    assert isinstance(recorder.calls[1].args[0], torch.Tensor)


def test_only_entries_are_recorded():
    net = Pair()
    recorder = recorder_of(net, ("decoder",))
    recorder.start()
    net.decoder(net.encoder(torch.rand(3, 4)), torch.rand(3, 4))
    recorder.stop()
    assert [call.entry for call in recorder.calls] == ["decoder"]


def test_the_first_tensor_is_seen_once_before_the_network_runs():
    net, seen = Pair(), []
    x = torch.rand(3, 4)
    recorder = recorder_of(net, entered=seen.append)
    recorder.start()
    net.decoder(net.encoder(x), x)
    recorder.stop()
    assert len(seen) == 1
    assert seen[0] is x


def test_stop_leaves_the_modules_as_they_were():
    net = Pair()
    before = attributes(net)
    recorder = recorder_of(net)
    recorder.start()
    net.encoder(torch.rand(3, 4))
    assert len(recorder.outputs) == 1
    recorder.stop()
    recorder.stop()
    assert_same_attributes(before, net)
    assert recorder.outputs == []
    assert len(recorder.calls) == 1


def test_a_copy_that_fails_is_raised_to_who_asks():
    def keep(tensor):
        raise ValueError("no copy")

    net = Pair()
    recorder = CallRecorder(dict(net.named_modules()), ("encoder",), keep)
    recorder.start()
    x = torch.rand(3, 4)
    output = net.encoder(x)  # training goes on
    recorder.stop()
    assert torch.equal(output, net.encoder(x))
    with pytest.raises(ValueError, match="no copy"):
        recorder.calls  # noqa: B018  # a property that raises


def test_a_network_that_raises_has_made_no_call():
    net = Pair()
    recorder = recorder_of(net)
    recorder.start()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net.encoder(torch.rand(3, 5))
    recorder.stop()
    assert recorder.calls == []


def test_boundary_activation_is_the_leaf_with_its_number():
    output = {"first": torch.zeros(1), "rest": [torch.ones(1), "text", torch.full((1,), 2.0)]}
    assert [boundary_activation(output, leaf).item() for leaf in range(3)] == [0.0, 1.0, 2.0]


class TestCrop:
    def test_every_argument_of_the_batch_size(self):
        call = NetworkCall("", (torch.arange(6).view(6, 1), torch.arange(12).view(2, 6)), {"mask": torch.ones(6, 3)})
        (cropped,) = crop_calls([call], 2)
        assert [tuple(value.shape) for value in (*cropped.args, cropped.kwargs["mask"])] == [(2, 1), (2, 6), (2, 3)]
        assert torch.equal(cropped.args[0], call.args[0][:2])

    def test_scalars_and_what_is_no_tensor_stay(self):
        call = NetworkCall("net", (torch.ones(4, 1), torch.tensor(3.0), "text"), {"scale": 2})
        (cropped,) = crop_calls([call], 3)
        assert tuple(cropped.args[0].shape) == (3, 1)
        assert torch.equal(cropped.args[1], torch.tensor(3.0))
        assert (cropped.entry, cropped.args[2], cropped.kwargs) == ("net", "text", {"scale": 2})

    def test_each_call_has_its_own_batch_size(self):
        calls = [NetworkCall("a", (torch.ones(4, 1),), {}), NetworkCall("b", (torch.ones(6, 1), torch.ones(4, 1)), {})]
        cropped = crop_calls(calls, 3)
        assert [[len(value) for value in call.args] for call in cropped] == [[3], [3, 4]]

    def test_more_samples_than_there_are_takes_all(self):
        (cropped,) = crop_calls([NetworkCall("", (torch.ones(4, 1),), {})], 100)
        assert len(cropped.args[0]) == 4
