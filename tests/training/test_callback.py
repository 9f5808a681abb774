"""`PrefixFreezing`, the base of every callback that freezes, with decisions that are a few lines."""

import itertools

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria import Decision, PrefixFreezing
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.observers import Observer
from lightning_egeria.errors import ArgumentError, CheckpointError, LayerChainError, UnsupportedError
from support.models import After, Classifier, ConvNet, fit, left_behind, loader


class At(PrefixFreezing):
    """Freezes by a schedule, {step: depth}."""

    def __init__(self, schedule, **arguments):
        super().__init__(**arguments)
        self.schedule = schedule

    def choose_depth(self, step):
        return Decision(self.schedule[step], "scheduled") if step in self.schedule else None


def events_of(callback):
    return [(event.step, event.kind, event.depth) for event in callback.events]


class TestFreezing:
    def test_it_freezes_after_the_step_that_it_was_decided_at(self):
        frozen, callback = {}, At({2: 1, 5: 2, 9: 0})

        class Looks(L.Callback):
            """Within a step: behind the last one of an epoch, parameters look as if nothing was frozen."""

            def on_before_backward(self, trainer, module, loss):
                frozen[trainer.global_step] = {
                    name.split(".")[1] for name, p in module.named_parameters() if not p.requires_grad
                }

        fit(Classifier(), callback, Looks())
        assert events_of(callback) == [(2, "freeze", 1), (5, "freeze", 2), (9, "unfreeze", 0)]
        changes = [(step, parts) for step, parts in frozen.items() if parts != frozen.get(step - 1, set())]
        assert changes == [(2, {"stem"}), (5, {"stem", "middle"}), (9, set())]

    def test_a_frozen_part_stands_still(self):
        weights = []
        module = Classifier()
        fit(module, At({4: 1}), After(lambda *_: weights.append(module.net.stem[0].weight.detach().clone())))
        same = [torch.equal(first, second) for first, second in itertools.pairwise(weights)]
        assert same == [False] * 3 + [True] * 11

    def test_the_same_depth_again_is_no_event(self):
        callback = At({2: 1, 3: 1})
        fit(Classifier(), callback)
        assert events_of(callback) == [(2, "freeze", 1)]

    def test_by_itself_it_never_freezes(self):
        callback = PrefixFreezing()
        fit(Classifier(), callback)
        assert callback.events == []

    def test_it_chooses_once_after_each_step(self):
        asked = []

        class Asking(PrefixFreezing):
            def choose_depth(self, step):
                asked.append(step)

        fit(Classifier(), Asking(), accumulate_grad_batches=2, epochs=2)
        assert asked == [1, 2, 3, 4, 5, 6]

    def test_what_it_knows_during_the_fit(self):
        known = []
        callback = At({2: 1})
        assert (callback.layer_modules, callback.frozen_depth, callback.freezer) == ([], 0, None)
        fit(Classifier(), callback, After(lambda *_: known.append((callback.layer_modules, callback.frozen_depth))))
        assert known[0] == (["net.stem.0", "net.middle.0", "net.deep.0"], 0)
        assert known[1] == (["net.stem.0", "net.middle.0", "net.deep.0"], 1)
        assert callback.frozen_depth == 1

    def test_the_learning_rate_is_that_of_the_front(self):
        class TwoRates(Classifier):
            def configure_optimizers(self):
                head = list(self.net.head.parameters())
                rest = [p for part in (self.net.stem, self.net.middle, self.net.deep) for p in part.parameters()]
                return torch.optim.SGD([{"params": head, "lr": 0.5}, {"params": rest, "lr": 0.05}])

        seen, callback = [], At({})
        fit(TwoRates(), callback, After(lambda *_: seen.append(callback.learning_rate)), epochs=1)
        assert seen == [0.05] * 5


class TestArguments:
    @pytest.mark.parametrize("freeze_until", [-0.5, 1.5])
    def test_freeze_until_is_a_share(self, freeze_until):
        with pytest.raises(ArgumentError, match=r"freeze_until .* in \[0, 1\], got"):
            PrefixFreezing(freeze_until=freeze_until)

    def test_layer_modules_is_a_list(self):
        with pytest.raises(ArgumentError, match="layer_modules must be a list of module paths, got the string 'net'"):
            PrefixFreezing(layer_modules="net")

    @pytest.mark.parametrize(("freeze_until", "deepest"), [(None, 2), (0.5, 1), (1.0, 2), ("net.stem", 1)])
    def test_freeze_until_ends_the_prefix(self, freeze_until, deepest):
        callback = At({}, freeze_until=freeze_until)
        fit(Classifier(), callback, epochs=1)
        assert callback.freezer.chain.max_depth == deepest

    def test_named_layer_modules_are_taken(self):
        callback = At({}, layer_modules=["net.stem", "net.deep"])
        fit(Classifier(), callback, epochs=1)
        assert callback.layer_modules == ["net.stem", "net.deep"]

    def test_an_unknown_layer_module_ends_the_fit(self):
        module = Classifier()
        with pytest.raises(LayerChainError, match=r"no module 'net\.stam'\. Did you mean 'net\.stem'"):
            fit(module, At({}, layer_modules=["net.stam", "net.deep"]))
        assert left_behind(module) == []

    def test_an_unknown_end_ends_the_fit(self):
        with pytest.raises(LayerChainError, match=r"freeze_until: 'stam' matches no layer module"):
            fit(Classifier(), At({}, freeze_until="stam"))

    def test_a_depth_out_of_range_ends_the_fit(self):
        module = Classifier()
        with pytest.raises(ValueError, match=r"in 0\.\.2"):
            fit(module, At({3: 7}))
        assert left_behind(module) == []


class Counting(Observer):
    def __init__(self):
        self.batches = 0

    def batch_start(self, batch, step):
        self.batches += 1


class WithObserver(At):
    def start_method(self, trainer, freezer, gathered, state):
        self.counting = Counting()
        return [self.counting]


class TestObserving:
    def test_observers_of_a_method_come_behind_the_freezer(self):
        callback, orders = WithObserver({}), []
        fit(Classifier(), callback, After(lambda *_: orders.append([type(one).__name__ for one in callback.observers])))
        assert orders[0] == ["Freezer", "Counting", "MetricsLog"]

    def test_observers_of_a_method_are_gone_after_the_fit(self):
        callback = WithObserver({})
        fit(Classifier(), callback)
        assert list(callback.observers) == []

    def test_a_second_fit_has_each_observer_once(self):
        callback = WithObserver({2: 1})
        fit(Classifier(), callback)
        first = callback.counting
        fit(Classifier(), callback)
        assert first.batches == callback.counting.batches == 14  # the first step only shows the layer modules

    def test_observers_of_others_stay(self):
        callback, counting = At({2: 1}), Counting()
        callback.observers.add(counting)
        fit(Classifier(), callback)
        assert list(callback.observers) == [counting]
        assert counting.batches == 15

    def test_a_trainer_s_callback_is_found(self):
        callback = At({})
        assert freezing_of(fit(Classifier(), callback, epochs=1)) is callback
        assert freezing_of(fit(Classifier(), epochs=1)) is None
        assert freezing_of(None) is None


class TestSetups:
    def test_a_fast_dev_run_freezes_nothing(self):
        callback = At({1: 1})
        fit(Classifier(), callback, fast_dev_run=3)
        assert (callback.events, callback.freezer) == ([], None)

    def test_lbfgs_is_refused(self):
        class WithLBFGS(Classifier):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters())

        with pytest.raises(UnsupportedError, match="LBFGS keeps moving frozen weights"):
            fit(WithLBFGS(), At({}))

    def test_manual_optimization_past_lightning_is_told(self):
        class Past(Classifier):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch, batch_idx):
                self.optimizers().zero_grad()
                super().training_step(batch, batch_idx).backward()
                self.optimizers().step()

        callback = At({2: 1})
        with pytest.warns(UserWarning, match=r"call self\.manual_backward\(loss\)"):
            fit(Past(), callback)
        assert callback.events == []

    def test_layers_that_begin_to_learn_are_found_anew(self):
        class Releasing(L.Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                for part in (pl_module.net.stem, pl_module.net.middle):
                    part.requires_grad_(trainer.current_epoch > 0)

        class Deep(Classifier):
            def __init__(self):
                super().__init__(nn.Sequential())
                self.net = ConvNet()
                self.net.deep.append(nn.Conv2d(4, 4, 1))
                self.net.deep.append(nn.Conv2d(4, 4, 1))

        callback, names = At({3: 1, 8: 1}), {}
        releasing = Releasing()
        look = After(lambda trainer, _: names.__setitem__(trainer.global_step, callback.layer_modules))
        with pytest.warns(UserWarning, match="started training after the layer modules were found"):
            fit(Deep(), callback, releasing, look)
        assert len(names[5]) < len(names[15])
        assert "net.stem.0" in names[15]
        assert events_of(callback) == [(3, "freeze", 1), (5, "unfreeze", 0), (8, "freeze", 1)]

    def test_too_few_that_learn_are_waited_for(self):
        class Releasing(L.Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                for name, part in pl_module.net.named_children():
                    part.requires_grad_(name == "head" or trainer.current_epoch > 0)

        callback = At({3: 1, 8: 1})
        with pytest.warns(UserWarning, match="not training yet: .* The callback looks for layer modules again"):
            fit(Classifier(), callback, Releasing())
        assert events_of(callback) == [(8, "freeze", 1)]


class TestCheckpoints:
    @pytest.fixture
    def checkpoint(self, tmp_path):
        """Written after step 10, with one layer module frozen after step 3."""

        def save(trainer, module):
            trainer.save_checkpoint(tmp_path / "checkpoint")

        fit(Classifier(), At({3: 1, 12: 2}), After(save, 10), epochs=2)
        return tmp_path / "checkpoint"

    def test_a_resumed_run_is_frozen_as_before(self, checkpoint):
        callback, module = At({12: 2}), Classifier()
        fit(module, callback, ckpt_path=checkpoint)
        assert events_of(callback) == [(3, "freeze", 1), (12, "freeze", 2)]

    def test_a_resumed_run_may_allow_less(self, checkpoint):
        class Less(At):
            pass

        callback = At({}, freeze_until=0.1)
        fit(Classifier(), callback, ckpt_path=checkpoint)
        assert events_of(callback) == [(3, "freeze", 1), (10, "unfreeze", 0)]

    def test_other_layer_modules_are_refused(self, checkpoint):
        with pytest.raises(CheckpointError, match="and this callback has layer_modules="):
            fit(Classifier(), At({}, layer_modules=["net.stem", "net.deep"]), ckpt_path=checkpoint)

    def test_another_version_is_refused(self):
        callback = At({})
        with pytest.raises(CheckpointError, match="state of version 99, expected version"):
            callback.load_state_dict({"version": 99})

    def test_damaged_state_is_told(self):
        callback = At({})
        with pytest.raises(CheckpointError, match="damaged"):
            callback.load_state_dict({"version": 1, "events": [{"step": 1}]})

    def test_a_method_gets_back_its_own_state(self, tmp_path):
        class Remembering(At):
            steps = 0

            def choose_depth(self, step):
                self.steps += 1
                return super().choose_depth(step)

            def method_state(self):
                return {"steps": self.steps}

            def start_method(self, trainer, freezer, gathered, state):
                self.steps = state["steps"] if state is not None else 0
                return ()

        first = Remembering({3: 1})
        trainer = fit(Classifier(), first, epochs=2)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        second = Remembering({})
        fit(Classifier(), second, ckpt_path=tmp_path / "checkpoint")
        assert (first.steps, second.steps) == (10, 15)


@pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero")
def test_no_batches_are_told():
    with pytest.warns(UserWarning, match="there are no training batches. The train dataloader is empty"):
        fit(Classifier(), At({}), data=loader(torch.utils.data.TensorDataset(torch.ones(0, 1, 8, 8), torch.ones(0))))
