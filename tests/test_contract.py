"""What every method promises, whatever it saves."""

import copy
import functools
import itertools
import json
import pickle
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_egeria import KnowledgeGuidedFreezing, PrefixFreezing, ScriptedPolicy
from lightning_egeria.cli.methods import METHODS as DECLARED
from lightning_egeria.core.snapshots.digests import digest
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.freezing import trial_plan
from support.agreement import compare_ranks
from support.methods import METHODS, WITH_A_PROCESS, WITH_A_TRIAL
from support.models import After, Classifier, ConvNet, equal, fit, images, left_behind
from support.ranks import EXCHANGE_TIMEOUT, all_well, in_ranks

EVAL_MODE = r"ignore:Found 1 module\(s\) in eval mode"
each = pytest.mark.parametrize("name", METHODS)
# With a reference process, a run takes ten times as long.
each_and_background = pytest.mark.parametrize(
    "name", [*METHODS, *(pytest.param(one, marks=pytest.mark.slow) for one in WITH_A_PROCESS if one not in METHODS)]
)


def classifier(method=None, dropout=0.2):
    torch.manual_seed(0)
    kind = method.kind() if method is not None else Classifier
    return kind(ConvNet(dropout=dropout))


def train(method, callbacks, folder, module=None, *others, idle=False, **arguments):
    module = module if module is not None else classifier(method)
    arguments |= method.arguments(idle)
    return module, fit(module, *callbacks, *others, data=method.data(folder, idle=idle), **arguments)


@pytest.fixture(autouse=True)
def _ends_the_process_group():
    yield
    if dist.is_initialized():  # Lightning leaves it to the end of the process
        dist.destroy_process_group()


class Run(NamedTuple):
    """One active run of a method, which several tests compare others with."""

    module: Classifier
    callbacks: list[Any]
    changes: list[Any]


@pytest.fixture(scope="module")
def plain():
    """Returns a module that was trained without a method."""

    @functools.cache
    def run(dropout):
        module = classifier(dropout=dropout)
        fit(module)
        return module

    return run


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Returns the first run of a method."""

    @functools.cache
    def run(name):
        method, callbacks = METHODS[name], METHODS[name].active()
        module, trainer = train(method, callbacks, tmp_path_factory.mktemp("first"))
        return Run(module, callbacks, method.changes(trainer))

    return run


def modes(module):
    return {path: part.training for path, part in module.named_modules()}


def test_each_method_of_the_package_has_a_line(tmp_path):
    found = set()
    for method in METHODS.values():
        parts = [*method.active(), method.data(tmp_path), *method.arguments().values()]
        found |= {part.egeria_method.name for part in parts if hasattr(part, "egeria_method")}
    assert not DECLARED.keys() - found, f"tests/support/methods.py needs a line for {DECLARED.keys() - found}"


@each_and_background
def test_idle_it_changes_no_bit_of_training(name, plain, tmp_path):
    method = WITH_A_PROCESS[name]
    module = classifier(method, method.dropout)
    watched, trainer = train(method, method.idle(), tmp_path, module, idle=True)
    assert watched.losses == plain(method.dropout).losses
    assert equal(watched, plain(method.dropout))
    assert method.changes(trainer) == []
    freezing = freezing_of(trainer)
    if isinstance(freezing, KnowledgeGuidedFreezing) and not isinstance(freezing.policy, ScriptedPolicy):
        assert freezing.savings().evaluations_done > 5  # else this would show nothing


@each
def test_active_it_changes_training_and_is_repeatable(name, plain, first, tmp_path):
    again, _ = train(METHODS[name], METHODS[name].active(), tmp_path)
    module, _, changes = first(name)
    assert len(changes) >= 1
    assert not equal(module, plain(0.2))
    assert module.losses == again.losses
    assert equal(module, again)


class Saves(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"epoch {trainer.current_epoch}")


@each
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    method = METHODS[name]
    # Lightning keeps no random state in checkpoints: without dropout nothing is drawn.
    whole, uninterrupted = train(method, method.active(), tmp_path / "first", classifier(method, 0), Saves(tmp_path))
    for epoch in (0, 1):
        resumed, trainer = train(
            method,
            method.active(),
            tmp_path / f"from {epoch}",
            classifier(method, 0),
            ckpt_path=tmp_path / f"epoch {epoch}",
        )
        assert trainer.global_step == uninterrupted.global_step
        assert method.steps is None or trainer.global_step == method.steps[0]
        assert resumed.losses == whole.losses[-len(resumed.losses) :]
        assert 0 < len(resumed.losses) <= 5 * (2 - epoch)
        assert equal(resumed, whole)
        assert method.changes(trainer) == method.changes(uninterrupted)
        assert len(method.changes(trainer)) >= 1


def run_on_a_rank(name, folder):
    trial_plan.BUDGET = 100.0  # of this process: the run is short
    method = WITH_A_TRIAL[name]
    module, callbacks = classifier(), method.active()
    freezes = any(isinstance(callback, PrefixFreezing) for callback in callbacks)
    compare = After(lambda trainer, _: compare_ranks(freezing_of(trainer).freezer) if freezes else None)
    strategy = DDPStrategy(timeout=EXCHANGE_TIMEOUT)
    data = method.data(folder, images(192))
    trainer = fit(module, *callbacks, compare, data=data, devices=2, strategy=strategy)
    frontier = getattr(freezing_of(trainer), "frontier", None)
    tried = frontier.losses if frontier is not None else {}
    return digest(dict(module.named_parameters())), method.changes(trainer), trainer.global_step, tried


@pytest.mark.parametrize("name", [name for name, method in WITH_A_TRIAL.items() if method.several_processes])
def test_two_ranks_agree(name, tmp_path):
    first, second = all_well(in_ranks(2, run_on_a_rank, name, tmp_path))
    assert first == second
    _, events, steps, tried = first
    assert len(tried) > 1 or "trial" not in name
    assert steps == 36 or METHODS[name].steps[0] < steps < 36
    assert len(events) >= 1


class InjectedError(Exception):
    pass


class Fails(Classifier):
    """Raises in its tenth step, when something is frozen."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 10:
            raise InjectedError
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(EVAL_MODE)
@each_and_background
def test_an_error_leaves_nothing_behind(name, tmp_path):
    method = WITH_A_PROCESS[name]
    module, callbacks = method.kind(Fails)(), method.active()
    module.net.deep[1].eval()  # as the user left it
    before = modes(module)
    with pytest.raises((InjectedError, UnsupportedError)) as raised:
        train(method, callbacks, tmp_path, module)
    assert InjectedError in (raised.type, type(raised.value.__cause__))  # a pipeline raises it from its tracing
    assert left_behind(module) == []
    assert modes(module) == before


@pytest.mark.filterwarnings(EVAL_MODE)
@each
def test_its_end_leaves_nothing_behind(name, tmp_path):
    method = METHODS[name]
    module = classifier(method)
    module.net.deep[1].eval()
    before = modes(module)
    _, trainer = train(method, method.active(), tmp_path, module)
    assert method.changes(trainer)[-1][1] > 0
    assert left_behind(module) == []
    assert modes(module) == before


def without_tensors(state):
    """The state, with None in the place of each tensor."""
    if isinstance(state, torch.Tensor):
        return None
    if isinstance(state, dict):
        return {key: without_tensors(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(without_tensors, state))
    return state


def assert_plain(state):
    kept = without_tensors(state)
    assert json.loads(json.dumps(kept)) == json.loads(json.dumps(kept))
    types = {type(leaf) for leaf in leaves(kept)}
    assert types <= {int, float, str, bool, type(None)}, types


def leaves(state):
    if isinstance(state, dict):
        assert all(type(key) is str for key in state), state.keys()
        return list(itertools.chain.from_iterable(map(leaves, state.values())))
    if isinstance(state, (list, tuple)):
        return list(itertools.chain.from_iterable(map(leaves, state)))
    return [state]


@each
def test_its_state_is_of_plain_types(name, tmp_path):
    method, callbacks, states = METHODS[name], METHODS[name].active(), []
    states.extend(callback.state_dict() for callback in callbacks)
    look = After(lambda *_: states.extend(callback.state_dict() for callback in callbacks), 1, 10, 15)
    _, trainer = train(method, callbacks, tmp_path / "cache", None, look)
    states.extend(callback.state_dict() for callback in callbacks)
    assert len(states) == 5 * len(callbacks)
    for state in states:
        assert_plain(state)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    read = torch.load(tmp_path / "checkpoint", weights_only=True)
    assert len(read["callbacks"]) >= len(callbacks)


@each
def test_a_second_fit_is_like_the_first(name, tmp_path):
    method, callbacks = METHODS[name], METHODS[name].active()
    first, trainer = train(method, callbacks, tmp_path / "first")
    events = method.changes(trainer)
    second, trainer = train(method, callbacks, tmp_path / "second")
    assert second.losses == first.losses
    assert equal(second, first)
    assert method.changes(trainer) == events


@each
def test_a_second_fit_of_one_trainer_goes_on(name, tmp_path):
    method = METHODS[name]
    module = classifier(method)
    _, trainer = train(method, method.active(), tmp_path, module)
    before = trainer.global_step
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, method.data(tmp_path / "second"))
    assert method.steps is None or trainer.global_step == method.steps[1]
    assert len(module.losses) == trainer.global_step > before
    assert left_behind(module) == []


@each
def test_a_pickled_callback_trains_alike(name, first, tmp_path):
    method = METHODS[name]
    module, trainer = train(method, pickle.loads(pickle.dumps(method.active())), tmp_path)
    assert equal(first(name).module, module)
    assert len(method.changes(trainer)) >= 1


@each
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_used_callback_can_be_copied(name, copied, first, tmp_path):
    method, (used, callbacks, changes) = METHODS[name], first(name)
    copies = copied(callbacks)
    kept, expected = (json.dumps([without_tensors(one.state_dict()) for one in those]) for those in (copies, callbacks))
    assert kept == expected
    module, trainer = train(method, copies, tmp_path)
    assert equal(used, module)
    assert method.changes(trainer) == changes


@each
def test_validating_and_predicting_leave_it_alone(name, tmp_path):
    method = METHODS[name]

    class Predicting(method.kind()):
        def validation_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("val/loss", loss, sync_dist=True)

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    torch.manual_seed(0)
    module = Predicting()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=method.active(),
        **method.arguments(),
    )
    plain = method.data(tmp_path)
    source = plain if isinstance(plain, torch.utils.data.DataLoader) else torch.utils.data.DataLoader(images(), 8)
    state = copy.deepcopy(module.state_dict())
    trainer.validate(module, source, verbose=False)
    predicted = trainer.predict(module, source)
    assert sum(map(len, predicted)) == 40
    assert method.adapted or method.changes(trainer) == []
    assert left_behind(module) == []
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
