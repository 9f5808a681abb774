"""The reference model against the obvious slow way: a copy of the network, run by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.calls import EarlierOutput, NetworkCall
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.snapshots.packing import copied
from lightning_egeria.freezing.reference import NEGLIGIBLE, EvaluationRequest, ReferenceModel, distances, noise_share
from lightning_egeria.freezing.similarity import gram_distance, gram_matrix


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
        self.third = nn.Linear(5, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.head(self.third(self.second(self.first(x)) * scale))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs():
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(2))


def chain_of(net, inputs):
    return LayerChain.trace(net, lambda: net(inputs).sum())


def snapshot(net, *entries):
    return copied({path: net.get_submodule(path) for path in entries or ("",)})


def moved_away(net, seed=5, by=0.3):
    """The network some steps later."""
    generator = torch.Generator().manual_seed(seed)
    net = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
        for buffer in net.buffers():
            buffer.add_(buffer.new_full((), by).to(buffer.dtype))
    return net


def evaluation(net, inputs, first=0, **kwargs):
    return EvaluationRequest([NetworkCall("", (inputs,), kwargs)], snapshot(net), first)


def by_hand(net, inputs, samples, normalises_by_batch=True):
    """In evaluation mode, but for batch normalisation: that goes by the samples it is given."""
    net = copy.deepcopy(net).eval()
    net.first[1].train(normalises_by_batch)
    with torch.no_grad():
        first = net.first(inputs)
        second = net.second(first)
        return [gram_matrix(a[:samples]) for a in (first, second, net.third(second))]


def expected(net, moved, inputs, samples, normalises_by_batch=True):
    grams = [by_hand(each, inputs, samples, normalises_by_batch) for each in (net, moved)]
    pairs = zip(*grams, strict=True)
    return pytest.approx([min(samples, 10) * float(gram_distance(a, b)) for a, b in pairs], abs=1e-6)


@pytest.mark.parametrize("samples", [4, 10, 64])
def test_plasticity_is_movement_in_evaluation_mode(net, inputs, samples):
    reference = ReferenceModel(chain_of(net, inputs), samples, "float32")
    shown, moved = snapshot(net), moved_away(net)
    wanted = expected(net, moved, inputs[:samples], samples)
    nn.init.zeros_(net.third.weight)  # the snapshot does not follow the model
    first = reference(evaluation(moved, inputs), shown)
    assert (first.samples, first.crops) == (min(samples, 10), samples < 10)
    assert (first.precision, first.reason) == ("float32", "as requested")
    # The first call tries whether fewer samples do, the second uses what it found.
    assert list(first.plasticity) == wanted
    assert list(reference(evaluation(moved, inputs), None).plasticity) == wanted


def test_running_statistics_are_not_what_a_network_has_learned(net, inputs):
    moved = copy.deepcopy(net)
    moved.first[1].running_mean.add_(1)
    moved.first[1].running_var.mul_(3)
    found = ReferenceModel(chain_of(net, inputs), 10, "float32")(evaluation(moved, inputs), snapshot(net))
    assert found.plasticity == (0.0, 0.0, 0.0)


def test_frozen_batch_normalisation_keeps_its_statistics(net, inputs):
    """It has frozen since the snapshot was taken, and learns again after."""
    reference = ReferenceModel(chain_of(net, inputs), 10, "float32")
    moved = moved_away(net)
    frozen = copy.deepcopy(moved)
    frozen.first.eval()
    learning = reference(evaluation(moved, inputs), snapshot(net)).plasticity
    assert list(reference(evaluation(frozen, inputs), None).plasticity) == expected(net, moved, inputs, 10, False)
    assert reference(evaluation(moved, inputs), None).plasticity == learning


def test_other_batch_normalisation_may_need_its_statistics(net, inputs):
    class Shifted(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + 0 * self.running_mean

    net.first[1] = Shifted(5)
    moved = moved_away(net)
    reference = ReferenceModel(chain_of(net, inputs), 10, "float32")
    wanted = expected(net, moved, inputs, 10, normalises_by_batch=False)
    assert list(reference(evaluation(moved, inputs), snapshot(net)).plasticity) == wanted
    assert list(reference(evaluation(moved, inputs), None).plasticity) == wanted


@pytest.mark.parametrize("precision", ["float32", "bf16", "int8"])
def test_where_nothing_has_changed_plasticity_is_zero(net, inputs, precision):
    chain = chain_of(net, inputs)
    with torch.no_grad():
        moved = copy.deepcopy(net)
        moved.third.weight.mul_(-1).add_(1)
    found = ReferenceModel(chain, 10, precision)(evaluation(moved, inputs), snapshot(net))
    assert found.precision == precision
    assert found.plasticity[:2] == (0.0, 0.0)
    assert found.plasticity[2] > 0.01


def test_what_is_frozen_is_not_measured(net, inputs):
    moved = moved_away(net)
    found = ReferenceModel(chain_of(net, inputs), 10, "float32")(evaluation(moved, inputs, first=1), snapshot(net))
    assert math.isnan(found.plasticity[0])
    assert found.plasticity[1:] == tuple(expected(net, moved, inputs, 10).expected[1:])


def test_a_new_snapshot_takes_over_weights_and_buffers(net, inputs):
    reference = ReferenceModel(chain_of(net, inputs), 10, "float32")
    moved = moved_away(net)
    before = reference(evaluation(moved, inputs), snapshot(net)).plasticity
    with torch.no_grad():
        net.first[0].weight.mul_(-1)
        net.first[1].running_mean.add_(1)
    after = reference(evaluation(moved, inputs), snapshot(net)).plasticity
    assert list(after) == expected(net, moved, inputs, 10)
    assert after != before


def test_what_is_the_same_for_every_sample_is_not_measured(net, inputs):
    """The first layer module has died; those behind it have nothing to tell apart."""
    with torch.no_grad():
        net.first[1].weight.zero_()
    found = ReferenceModel(chain_of(net, inputs), 10, "float32")(evaluation(copy.deepcopy(net), inputs), snapshot(net))
    assert all(math.isnan(value) for value in found.plasticity)


def test_one_sample_is_not_measured(net, inputs):
    moved = moved_away(net)
    found = ReferenceModel(chain_of(net, inputs), 10, "float32")(evaluation(moved, inputs[:1]), snapshot(net))
    assert all(math.isnan(value) for value in found.plasticity)


def test_the_model_and_the_random_state_stay_as_they_were(net, inputs):
    chain = chain_of(net, inputs)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    ReferenceModel(chain, 4)(evaluation(net, inputs), snapshot(net))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any("forward" in vars(module) for module in net.modules())


def test_keyword_arguments_reach_the_network(net, inputs):
    reference = ReferenceModel(chain_of(net, inputs), 10, "float32")
    moved = moved_away(net)
    plain = reference(evaluation(moved, inputs, scale=1.0), snapshot(net)).plasticity
    scaled = reference(evaluation(moved, inputs, scale=torch.randn(5)), None).plasticity
    assert plain[1] == scaled[1]
    assert plain[2] != scaled[2]


def test_a_network_that_mixes_its_samples_sees_the_whole_batch(inputs):
    class Mixes(Net):
        def forward(self, x, scale=1.0):
            return super().forward(x - x.mean(0), scale)

    torch.manual_seed(0)
    net = Mixes()
    reference = ReferenceModel(chain_of(net, inputs), 4, "float32")
    moved = moved_away(net)
    first = reference(evaluation(moved, inputs), snapshot(net))
    assert not first.crops
    assert list(first.plasticity) == expected(net, moved, inputs - inputs.mean(0), 4)


def test_an_output_given_to_a_later_call_is_the_reference_s_own(net, inputs):
    def whole(net):
        return nn.ModuleDict({"encoder": net.first, "decoder": nn.Sequential(net.second, net.third, net.head)})

    before, moved = whole(net), moved_away(net)
    chain = LayerChain.trace(before, lambda: before["decoder"](before["encoder"](inputs)).sum())
    calls = [NetworkCall("encoder", (inputs,), {}), NetworkCall("decoder", (EarlierOutput(0, 0),), {})]
    names = ("encoder", "decoder")
    given = EvaluationRequest(calls, snapshot(whole(moved), *names), 0)
    found = ReferenceModel(chain, 64, "float32")(given, snapshot(before, *names))
    assert list(found.plasticity) == expected(net, moved, inputs, 64)


def test_the_first_evaluation_needs_a_snapshot(net, inputs):
    with pytest.raises(RuntimeError, match="snapshot"):
        ReferenceModel(chain_of(net, inputs), 4)(evaluation(net, inputs), None)


class TestPrecision:
    @pytest.mark.parametrize("precision", ["bf16", "int8"])
    def test_a_low_precision_is_close_to_float32(self, net, inputs, precision):
        chain = chain_of(net, inputs)
        low, full = (
            ReferenceModel(chain, 10, precision)(evaluation(moved_away(net), inputs), snapshot(net))
            for precision in (precision, "float32")
        )
        assert (low.precision, full.precision, low.reason) == (precision, "float32", "as requested")
        assert low.plasticity == pytest.approx(full.plasticity, rel=0.1)
        assert low.plasticity != full.plasticity

    def test_auto_decides_for_one_and_says_why(self, net, inputs):
        reference = ReferenceModel(chain_of(net, inputs), 10, "auto")
        moved = moved_away(net)
        first, second = (reference(evaluation(moved, inputs), snapshot(net)) for _ in range(2))
        assert first.precision in ("bf16", "int8", "float32")
        assert "times as fast as float32" in first.reason
        assert second.precision == first.precision

    def test_int8_gives_way_to_bf16(self, inputs):
        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm, self.head = nn.LSTM(6, 5), nn.LSTM(5, 2)

            def forward(self, x):
                return self.head(self.lstm(x)[0])[0]

        net = Reads()
        reference = ReferenceModel(LayerChain.trace(net, lambda: net(inputs).sum(), ["lstm", "head"]), 10, "int8")
        found = reference(evaluation(moved_away(net), inputs), snapshot(net))
        assert found.precision == "bf16"
        assert "fails in int8" in found.reason

    @pytest.mark.parametrize("precision", ["auto", "bf16"])
    def test_noise_beside_what_is_measured_makes_it_step_up_for_good(self, net, inputs, precision, monkeypatch):
        monkeypatch.setattr("lightning_egeria.freezing.reference.seconds_of", lambda *_: 1.0)  # none is faster
        reference = ReferenceModel(chain_of(net, inputs), 10, precision)
        shown, moved = snapshot(net), moved_away(net, by=2e-3)  # less than bfloat16 can say well
        found = reference(evaluation(moved, inputs), shown)
        assert found.precision == "float32"
        assert "bf16 changes plasticity by" in found.reason
        assert reference(evaluation(moved_away(net), inputs), snapshot(net)).precision == "float32"

    @pytest.mark.parametrize("precision", ["auto", "bf16"])
    def test_a_network_that_does_not_run_in_bf16_runs_in_float32(self, inputs, precision, monkeypatch):
        monkeypatch.setattr("lightning_egeria.freezing.reference.seconds_of", lambda *_: 1.0)  # none is faster

        class Solves(Net):
            def forward(self, x, scale=1.0):
                return super().forward(torch.linalg.solve(torch.eye(6).to(x.dtype), x.T).T, scale)

        net = Solves()
        given = evaluation(moved_away(net), inputs)
        found = ReferenceModel(chain_of(net, inputs), 10, precision)(given, snapshot(net))
        assert found.precision == "float32"
        assert "fails in bf16" in found.reason
        assert all(map(math.isfinite, found.plasticity))


def grams(count, samples=10):
    return [gram_matrix(torch.randn(samples, 7, generator=torch.Generator().manual_seed(5))) for _ in range(count)]


def test_distances_are_nan_where_there_is_nothing_to_compare():
    first, second = grams(2), [grams(1)[0], None]
    assert math.isnan(distances(first, second)[1])
    assert math.isnan(distances(grams(1), grams(1, samples=4))[0])


def test_noise_share_is_the_worst_of_the_boundaries():
    assert noise_share((10.0, 4.0, math.nan), (11.0, 2.0, 1.0)) == 0.5
    assert noise_share((0.0, 1.0), (0.5 * NEGLIGIBLE, 1.0)) == 0.0
    assert noise_share((0.0,), (1.0,)) == math.inf
