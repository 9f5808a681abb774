"""`StructuredPartialBackprop` in a Trainer, against whole steps whose front gradients are set to zero."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import Choice, FrozenPrefixCache, PrefixFreezing, StructuredPartialBackprop
from lightning_egeria.errors import ArgumentError, CheckpointError, UnsupportedError
from support.methods import LinearFreezing, scripted, tuner
from support.models import After, Classifier, ConvNet, equal, fit, left_behind, loader
from support.networks import TiedHead, ids

PARTS = ("stem", "middle", "deep")  # of `ConvNet`, one layer module each


class Zeroed(L.Callback):
    """The slow reference: computes every gradient, and sets those in front of the suffix to zero."""

    def on_after_backward(self, trainer, pl_module):
        for part in PARTS[: trainer.global_step % 3]:
            for parameter in getattr(pl_module.net, part).parameters():
                parameter.grad.zero_()


def module(optimizer="sgd"):
    torch.manual_seed(0)
    return Classifier(ConvNet(), optimizer=optimizer)


SETTINGS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.1},
    "bfloat16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_as_whole_steps_with_zeroed_gradients(name, optimizer):
    whole, ours = module(optimizer), module(optimizer)
    fit(whole, Zeroed(), **SETTINGS[name])
    fit(ours, StructuredPartialBackprop(), **SETTINGS[name])
    assert ours.losses == whole.losses
    assert equal(ours, whole)


def test_depths_that_do_not_fit_the_layer_chain_are_refused():
    with pytest.raises(ArgumentError, match=r"depths must be at most 3, the number of layer modules, got \[4\]"):
        fit(module(), StructuredPartialBackprop([4]))


def test_weight_decay_and_momentum_apply_in_each_step():
    """A front weight moves in a step without its gradient, as it does with a gradient of zero."""
    weights, callback = [], StructuredPartialBackprop()
    ours = module()
    fit(ours, callback, After(lambda *_: weights.append(ours.net.stem[0].weight.detach().clone())), epochs=1)
    assert not torch.equal(weights[0], weights[1])
    assert callback.contributions == {"net.stem.0": 2, "net.middle.0": 4, "net.deep.0": 5}


def test_every_length_whole_is_training_without_it():
    plain, ours = module(), module()
    fit(plain)
    fit(ours, StructuredPartialBackprop(min_share=1))
    assert equal(plain, ours)


def test_no_gradient_is_computed_in_front_of_the_suffix():
    seen = {}

    class Looking(Classifier):
        def training_step(self, batch, batch_idx):
            learns = {part: next(getattr(self.net, part).parameters()).requires_grad for part in PARTS}
            seen[self.global_step] = [part for part in PARTS if learns[part]]
            return super().training_step(batch, batch_idx)

    ours = Looking()
    fit(ours, StructuredPartialBackprop(), accumulate_grad_batches=2, epochs=1)
    assert seen == {0: list(PARTS), 1: ["middle", "deep"], 2: ["deep"]}
    assert left_behind(ours) == []


def test_between_batches_everything_is_as_the_user_set_it():
    frozen = []
    ours = module()
    ours.net.stem[1].requires_grad_(False)
    fit(ours, StructuredPartialBackprop(), After(lambda _, it: frozen.append(left_behind(it))))
    assert frozen == [["net.stem.1.weight", "net.stem.1.bias"]] * 15


def test_with_the_cache_suffixes_begin_at_the_frozen_depth():
    found, counts = [], []
    for cached in (False, True):
        torch.manual_seed(0)
        ours, callback = Classifier(ConvNet(dropout=0)), StructuredPartialBackprop()
        data = FrozenPrefixCache(loader(), min_free_bytes=0) if cached else loader()
        fit(ours, scripted({3: 1}), callback, data=data, epochs=5)
        found.append(ours)
        counts.append(callback.contributions)
    assert found[0].losses == found[1].losses
    assert equal(*found)
    assert counts[0] == counts[1]
    assert counts[0]["net.stem.0"] == 1 < counts[0]["net.middle.0"] < counts[0]["net.deep.0"]
    assert data.stats.hits > 40
    assert callback.savings().activation_bytes.keys() == {1, 2}


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_step_that_returns_none_is_not_counted():
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (0, 3) else loss

    callback, ours = StructuredPartialBackprop(), Skipping()
    fit(ours, callback, epochs=1)
    assert callback.contributions == {"net.stem.0": 1, "net.middle.0": 2, "net.deep.0": 3}  # of steps 1, 2 and 4
    assert left_behind(ours) == []


class Measured(PrefixFreezing):
    """Whose plasticity is given, from step 5 on."""

    measures_plasticity = True

    @property
    def latest_plasticity(self):
        return (5, [0.3, 0.6, 1.0]) if self.freezer is not None and self.freezer.step >= 5 else None


def test_graded_suffixes_follow_plasticity_after_each_tenth_step():
    depths, callback = [], StructuredPartialBackprop("graded", min_share=0.3)
    ours = module()
    fit(ours, Measured(), callback, After(lambda *_: depths.append(callback.paused_modules)), epochs=4)
    assert depths == [0] * 10 + [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    expected = {"net.stem.0": 9 + 3, "net.middle.0": 9 + 7, "net.deep.0": 19}  # the first step shows the layer modules
    assert callback.contributions == expected
    gradients, ranks, activations = (panel.series for panel in callback.panels())
    assert gradients == {"gradients": list(enumerate(expected.values()))}
    assert set(ranks) == {"backward"}
    assert [depth for depth, _ in activations["activations"]] == [0, 1, 2]


def test_suffixes_go_on_behind_a_search_whose_steps_are_whole():
    callback, search = StructuredPartialBackprop(), tuner({"lr": Choice([0.05, 0.1])}, at_epochs=(1,))
    ours = module()
    trainer = fit(ours, search, callback, epochs=4)
    (found,) = search.searches
    assert (found.setting, len(found.branches)) == ({"lr": 0.1}, 2)
    assert callback.contributions["net.deep.0"] == trainer.global_step - found.trial_steps  # trials are not seen
    assert callback.contributions["net.stem.0"] < callback.contributions["net.middle.0"] < trainer.global_step
    assert left_behind(ours) == []


def test_a_search_of_one_setting_changes_nothing():
    alone, searching = module(), module()
    fit(alone, StructuredPartialBackprop(), epochs=4)
    fit(searching, StructuredPartialBackprop(), tuner({"lr": Choice([0.05])}, at_epochs=(1,)), epochs=4)
    assert searching.losses == alone.losses
    assert equal(searching, alone)


class TestRefused:
    def test_grades_without_plasticity(self):
        for others in ([], [LinearFreezing()]):
            with pytest.raises(ArgumentError, match="depths='graded' follows plasticity, which KnowledgeGuidedFreezin"):
                fit(module(), *others, StructuredPartialBackprop("graded"))

    def test_arguments(self):
        with pytest.raises(ArgumentError, match=r"depths must be one of .* or a list of numbers, got 'all'"):
            StructuredPartialBackprop(depths="all")
        with pytest.raises(ArgumentError, match=r"min_share must be a share in \(0, 1\], got 0"):
            StructuredPartialBackprop(min_share=0)
        with pytest.raises(ArgumentError, match=r"min_share must be a share in .* got '1'"):
            StructuredPartialBackprop(min_share="1")
        with pytest.raises(ArgumentError, match="a whole number of at least 1 for each rank, got 3"):
            StructuredPartialBackprop(depths=3)
        with pytest.raises(ArgumentError, match="layer_modules must be a list of module paths"):
            StructuredPartialBackprop(layer_modules="net")

    def test_manual_optimization(self):
        ours = module()
        ours.automatic_optimization = False
        with pytest.raises(UnsupportedError, match="and manual optimization may have others"):
            fit(ours, StructuredPartialBackprop())

    def test_an_optimizer_with_several_backwards(self):
        class WithLBFGS(Classifier):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters(), max_iter=3)

        ours = WithLBFGS()
        with pytest.raises(UnsupportedError, match="as LBFGS and SAM do"):
            fit(ours, StructuredPartialBackprop())
        assert left_behind(ours) == []

    def test_compiled_models(self):
        ours = module()
        ours.net = torch.compile(ours.net, backend="eager")
        with pytest.raises(UnsupportedError, match="a compiled model would compile again"):
            fit(ours, StructuredPartialBackprop())


def test_tied_weights_make_all_steps_whole():
    class Tied(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]).transpose(1, 2), batch[0])

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.cat([ids(3, 6) for _ in range(4)])), batch_size=3)
    callback = StructuredPartialBackprop()
    tied = pytest.warns(UserWarning, match="and again behind the last layer module")
    with tied, pytest.warns(UserWarning, match="every step is a full backward"):
        fit(Tied(TiedHead()), callback, data=data, epochs=1)
    assert set(callback.contributions.values()) == {4}


class TestCheckpoints:
    def test_contributions_go_on(self, tmp_path):
        first, second = StructuredPartialBackprop(), StructuredPartialBackprop()
        trainer = fit(module(), first, epochs=1)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        fit(module(), second, ckpt_path=tmp_path / "checkpoint", epochs=2)
        assert second.contributions == {"net.stem.0": 4, "net.middle.0": 7, "net.deep.0": 10}

    @pytest.mark.parametrize("contributions", [[1, 2], [1, 2, "x"], None])
    def test_damaged_state_is_told(self, tmp_path, contributions):
        trainer = fit(module(), StructuredPartialBackprop(), epochs=1)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        whole = torch.load(tmp_path / "checkpoint", weights_only=True)
        (state,) = whole["callbacks"].values()
        state["contributions"] = contributions
        torch.save(whole, tmp_path / "checkpoint")
        with pytest.raises(CheckpointError, match="the partial backprop state in the checkpoint is damaged"):
            fit(module(), StructuredPartialBackprop(), ckpt_path=tmp_path / "checkpoint", epochs=2)
