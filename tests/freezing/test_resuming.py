"""What a resumed run takes over, and what it refuses."""

import copy
import json

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria import FreezingPolicy, ScriptedPolicy
from lightning_egeria.errors import ArgumentError, CheckpointError, LayerChainError
from support.freezing.callback_runs import fit, freezing, module
from support.models import After


@pytest.mark.parametrize("depth_at_save", [0, 2])
def test_resumes_where_the_checkpoint_was_taken(tmp_path, depth_at_save):
    script = {6: 2, 17: 1} if depth_at_save else {13: 2, 17: 1}
    whole, parts = module(), module()
    fit(whole, freezing(ScriptedPolicy(script)))
    path = tmp_path / "half.ckpt"
    fit(
        parts,
        freezing(ScriptedPolicy(script)),
        After(lambda trainer, _: trainer.save_checkpoint(path), 10),
        epochs=2,
    )
    assert torch.load(path, weights_only=True)["global_step"] == 10

    resumed = module()
    callback = freezing(ScriptedPolicy(script))
    seen = {}
    fit(resumed, callback, After(lambda _, __: seen.update(depth=callback.freezer.prefix.depth), 11), ckpt_path=path)

    assert seen["depth"] == depth_at_save
    assert [event.depth for event in callback.events] == [2, 1]
    for name, value in whole.state_dict().items():
        # Dropout draws other numbers after a restart, with and without the callback; what is frozen is exact.
        if depth_at_save and ".stem." in name:
            assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_state_is_plain_and_another_version_is_refused(tmp_path):
    callback = freezing(ScriptedPolicy({2: 1}))
    fit(module(), callback, epochs=1)
    state = json.loads(json.dumps(callback.state_dict()))
    with pytest.raises(CheckpointError, match="version 99"):
        freezing().load_state_dict({**state, "version": 99})

    other = freezing()
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="ScriptedPolicy"):
        fit(module(), other, epochs=1)


def test_a_resumed_run_that_was_over_keeps_its_events(tmp_path):
    """Nothing is trained, so nothing is frozen again; what is saved then is what was loaded."""

    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    first, again = freezing(ScriptedPolicy({2: 1})), freezing(ScriptedPolicy({2: 1}))
    fit(module(), first, Saves())
    trainer = fit(module(), again, ckpt_path=tmp_path / "last.ckpt")
    assert again.events == first.events != []
    assert again.frozen_depth == 1
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    states = [torch.load(tmp_path / name, weights_only=True)["callbacks"] for name in ("last.ckpt", "again.ckpt")]
    assert states[0] == states[1]


@pytest.mark.filterwarnings("ignore:freezing. the layer chain in the checkpoint")
def test_the_chain_of_another_network_is_found_again(recwarn):
    callback = freezing(ScriptedPolicy({2: 1}))
    fit(module(), callback, epochs=1)
    state = callback.state_dict()
    other = freezing(ScriptedPolicy({2: 1}))
    other.load_state_dict(state)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    fit(module(net=net), other, epochs=1)
    (text,) = [str(one.message) for one in recwarn if "layer chain in the checkpoint" in str(one.message)]
    assert "differs from the model's: Module lacks 'some_name.stem" in text
    assert other.layer_modules == ["some_name.1", "some_name.2"]
    assert [(event.kind, event.depth) for event in other.events] == [("freeze", 1), ("unfreeze", 0), ("freeze", 1)]


def resumed(policy, **arguments):
    """A callback that goes on after another froze two of the three layer modules of `Net`."""
    first = freezing(copy.deepcopy(policy), evaluate_every_n_steps=2, deterministic=True)
    fit(module(), first, epochs=1)
    assert (first.frozen_depth, len(first.layer_modules)) == (2, 3)
    callback = freezing(policy, evaluate_every_n_steps=2, deterministic=True, **arguments)
    callback.load_state_dict(copy.deepcopy(first.state_dict()))
    return callback


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_is_at_rest_was_so_against_one_reference(tmp_path, deterministic):
    policy = FreezingPolicy(tolerance=1e9, patience=4, pretrained=True, trial=False, peer_tolerance=0)
    whole, first, again = (freezing(policy, evaluate_every_n_steps=2, deterministic=deterministic) for _ in range(3))
    fit(module(), whole)
    fit(module(), first, epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    at_rest = first.state_dict()["method"]["policy"]["state"]["at_rest"][0]
    assert 0 < at_rest < 4
    fit(module(), again, ckpt_path=tmp_path / "one.ckpt")
    late = 0 if deterministic else 2 * at_rest  # without the weights of the reference, another one begins
    assert again.events[0].step == whole.events[0].step + late


class Anything(FreezingPolicy):
    def __init__(self):
        super().__init__(tolerance=1e9, patience=1, pretrained=True, trial=False, peer_tolerance=0)


@pytest.mark.parametrize("policy", [Anything(), ScriptedPolicy({4: 2})])
@pytest.mark.parametrize(
    ("arguments", "depth"),
    [
        ({"freeze_until": 0.4}, 1),
        ({"freeze_until": "some_name.stem"}, 1),
        ({"freeze_until": 0.1}, 0),
        ({"freeze_until": "some_name.middle"}, 2),
    ],
)
def test_a_resumed_run_has_its_own_limits(policy, arguments, depth):
    if isinstance(policy, ScriptedPolicy) and depth < 2:
        with pytest.raises(ArgumentError, match=f"this model allows at most {depth}"):
            fit(module(), resumed(policy, **arguments), epochs=1)
        return
    callback, net = resumed(policy, **arguments), module()
    fit(net, callback, epochs=1)
    expected = [2] if depth == 2 else [2, depth]
    assert [event.depth for event in callback.events] == expected
    again = freezing(policy, evaluate_every_n_steps=2, deterministic=True, **arguments)
    again.load_state_dict(copy.deepcopy(callback.state_dict()))
    fit(net, again, epochs=1)
    assert [event.depth for event in again.events] == expected


def test_a_resumed_run_refuses_other_layer_modules():
    with pytest.raises(LayerChainError, match=r"'some_name\.neck' matches no layer module. Did you mean"):
        fit(module(), resumed(Anything(), freeze_until="some_name.neck"), epochs=1)
    with pytest.raises(CheckpointError, match=r"has layer_modules=\['some_name\.stem', 'some_name\.deep'\]"):
        fit(module(), resumed(Anything(), layer_modules=["some_name.stem", "some_name.deep"]), epochs=1)
    fit(module(), resumed(Anything(), layer_modules=[f"some_name.{name}.0" for name in ("stem", "middle", "deep")]))


def test_a_reference_that_does_not_fit_leaves_nothing_frozen():
    callback = freezing(ScriptedPolicy({2: 2}))
    fit(module(), callback, epochs=1)
    state = callback.state_dict()
    state["method"]["comparison"]["reference"] = {}
    other, net = freezing(ScriptedPolicy({2: 2})), module()
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="reference model"):
        fit(net, other, epochs=1)
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any("train" in vars(part) for part in net.modules())
    assert all(part.training for part in net.some_name.modules())
