"""`pretrained="auto"`: what the callback sees when training starts, and what it keeps."""

import copy
import logging

import lightning as L
import pytest
from torch import nn

from lightning_egeria import FreezingPolicy, SlopePolicy
from lightning_egeria.core.network.normalisation import normalisation_layers
from lightning_egeria.freezing.pretrained import answer_auto, untrained_behind
from support.freezing.callback_runs import fit, freezing, module
from support.models import equal, mlp

pytestmark = pytest.mark.filterwarnings("ignore:freezing. nothing froze")


def trained(epochs=2):
    """The network of a run that is over."""
    net = module()
    fit(net, epochs=epochs)
    return net


def seen(caplog):
    return [text for record in caplog.records if "pretrained='auto'" in (text := record.getMessage())]


@pytest.fixture(autouse=True)
def _logged(caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")


@pytest.mark.parametrize(("make", "expected", "count"), [(module, False, "0 of 2"), (trained, True, "2 of 2")])
def test_the_weights_are_told_and_one_line_says_so(caplog, make, expected, count):
    net, callback = make(), freezing(evaluate_every_n_steps=2)
    caplog.clear()
    fit(net, callback, epochs=1)
    assert callback.active_policy.pretrained is expected
    (line,) = seen(caplog)
    assert f"{count} normalisation layers in the front half" in line
    assert f"FreezingPolicy(pretrained={not expected}) if that is wrong" in line


@pytest.mark.parametrize("make", [module, trained])
@pytest.mark.parametrize("answer", [True, False])
def test_the_user_wins_without_a_word(caplog, make, answer):
    net, callback = make(), freezing(FreezingPolicy(pretrained=answer))
    caplog.clear()
    fit(net, callback, epochs=1)
    assert callback.active_policy.pretrained is answer
    assert seen(caplog) == []


def test_auto_is_what_the_answer_would_have_been():
    """On both sides: the same events, and the same weights bit for bit."""
    for start, answer in ((module(), False), (trained(), True)):
        runs = []
        for pretrained in ("auto", answer):
            policy = FreezingPolicy(tolerance=0.5, patience=1, pretrained=pretrained, peer_tolerance=0.9)
            net, callback = copy.deepcopy(start), freezing(policy, evaluate_every_n_steps=2, deterministic=True)
            fit(net, callback)
            runs.append((net, callback.events))
        assert equal(runs[0][0], runs[1][0])
        assert runs[0][1] == runs[1][1] != []


def test_a_new_head_on_a_trained_front_is_fine_tuning():
    net = module()
    donor = trained()
    net.some_name.stem, net.some_name.middle = donor.some_name.stem, donor.some_name.middle
    callback = freezing()
    fit(net, callback, epochs=1)
    assert callback.active_policy.pretrained is True


def test_a_trained_end_on_a_new_front_is_not():
    net = module()
    net.some_name.deep = trained().some_name.deep
    callback = freezing()
    fit(net, callback, epochs=1)
    assert callback.active_policy.pretrained is False


def test_without_normalisation_layers_nothing_tells(caplog):
    net, callback = module(net=nn.Sequential(nn.Flatten(), nn.Linear(64, 6), mlp())), freezing()
    fit(net, callback, epochs=1)
    assert callback.active_policy.pretrained is False
    (line,) = seen(caplog)
    assert "no normalisation layers" in line
    assert "FreezingPolicy(pretrained=True)" in line


@pytest.mark.parametrize("make", [module, trained])
def test_a_resumed_run_keeps_its_answer(caplog, tmp_path, make):
    """Though the weights are trained by then, those of a run from scratch too."""
    net, first, again = make(), freezing(), freezing()
    fit(net, first, epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    caplog.clear()
    fit(module(), again, ckpt_path=tmp_path / "two.ckpt")
    assert again.active_policy.pretrained is first.active_policy.pretrained is (make is trained)
    assert seen(caplog) == []


def test_a_true_or_false_wins_over_the_checkpoint(tmp_path):
    fit(module(), freezing(), epochs=2).save_checkpoint(tmp_path / "two.ckpt")
    callback = freezing(FreezingPolicy(pretrained=True))
    fit(module(), callback, ckpt_path=tmp_path / "two.ckpt")
    assert callback.active_policy.pretrained is True


class Releases(L.Callback):
    """Lets the stem learn from the third epoch on, so that the layer modules are found again."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.some_name.stem.requires_grad_(trainer.current_epoch >= 2)


@pytest.mark.filterwarnings("ignore:freezing. parameters started training")
@pytest.mark.parametrize("resumes", [False, True])
def test_layer_modules_found_again_keep_the_answer(tmp_path, resumes):
    callback, path = freezing(), None
    if resumes:
        path = tmp_path / "one.ckpt"
        fit(module(), Releases(), freezing(), epochs=1).save_checkpoint(path)
    net = module()
    net.some_name.stem.requires_grad_(False)
    fit(net, Releases(), callback, ckpt_path=path)
    assert "some_name.stem.0" in callback.layer_modules
    assert callback.active_policy.pretrained is False


def test_a_second_fit_starts_from_trained_weights():
    net, callback = module(), freezing()
    answers = []
    for _ in range(2):
        fit(net, callback, epochs=2)
        answers.append(callback.active_policy.pretrained)
    assert answers == [False, True]
    assert callback.policy is None


def test_other_policies_are_not_asked(caplog):
    fit(module(), freezing(SlopePolicy()), epochs=1)
    assert seen(caplog) == []


def test_parameters_are_those_of_a_plain_run():
    plain, watched = module(), module()
    fit(plain)
    fit(watched, freezing(FreezingPolicy(tolerance=1e-12)))
    assert equal(plain, watched)


def test_ranks_take_the_answer_of_the_first(monkeypatch):
    """A rank of FSDP2 sees its part only."""
    callback = freezing()
    fit(module(), callback, epochs=1)
    asked = []
    monkeypatch.setattr(callback.ranks, "share", lambda value: asked.append(value) or [[True, True], 1])
    policy, chain = FreezingPolicy(), callback.freezer.chain
    norms = dict.fromkeys(normalisation_layers(callback.freezer.prefix.module), False)
    answer_auto(policy, norms, chain, callback.ranks, callback.notices)
    assert policy.pretrained is True
    assert asked == [[[False, False], 0]]


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ({"a": True, "b": True, "decoder.norm": False}, "decoder.norm"),
        ({"a": True, "b": True, "decoder.norm": True}, None),
        ({"a": True, "b": False, "decoder.norm": False}, None),  # nothing tells that the front is trained
        ({"a": True, "b": True}, None),
        ({}, None),
    ],
)
def test_untrained_layers_behind_trained_ones_are_found(norms, expected):
    class Chain:
        def __len__(self):
            return 4

        def members(self, depth):
            return ["a", "b", "c", "d"][:depth]

    class Alone:
        def share(self, value):
            return value

    assert untrained_behind(norms, Chain(), Alone()) == expected


@pytest.mark.parametrize(("points", "depths"), [(0, []), (2, [2])])
def test_limits_hold_in_front_of_an_untrained_part(points, depths, caplog):
    """What it learns at first would hide what the others do."""
    net = trained()
    net.some_name.head = nn.Sequential(nn.Linear(net.some_name.head.in_features, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    callback = freezing(max_loss_points=points)
    fit(net, callback, epochs=4)
    assert [event.depth for event in callback.events] == depths
    assert (
        "what the untrained 'some_name.head.1' learns would hide what other layers do, so the frozen share"
        in caplog.text
    )
    assert callback.frontier is None
