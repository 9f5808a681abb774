"""When the network is compared, and with which reference."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.freezer import Decision, Freezer
from lightning_egeria.freezing import comparison as comparison_module
from lightning_egeria.freezing.comparison import comparison_of, evaluation_interval
from lightning_egeria.freezing.runner import ReferenceRunner
from support.freezing.held import Asked, Run, Told
from support.networks import deep_mlp


@pytest.mark.parametrize(("wait_s", "heard"), [(0.0, [3, 5, 7]), (60.0, [4, 6, 8])])
def test_an_answer_is_used_when_it_comes_or_is_waited_for(wait_s, heard):
    run = Run(Asked(), wait_s=wait_s).steps(8)
    # The reference is made of the weights that were given, step 2 evaluates, and the answer comes after it.
    assert list(run.policy.plasticity()) == heard
    assert [step for step, *_ in run.policy.told] == list(range(1, 9))
    assert [step for step, _, _, loss in run.policy.told if loss is not None] == [2, 4, 6, 8]


def test_what_an_evaluation_in_this_thread_says_is_heard_at_once():
    run = Run(Asked({4: Decision(1, "test")}))
    run.pool.submit = functools.partial(ReferenceRunner.submit, run.pool)
    run.steps(8)
    assert list(run.policy.plasticity()) == [2, 4, 6, 8]
    assert [event.step for event in run.events] == [4]
    assert (run.evaluations.counts.late, run.evaluations.counts.dropped, run.evaluations.counts.done) == (0, 0, 4)


class TestLateAnswers:
    def late(self, run, times):
        """Each answer comes three steps after it was asked for, when the next one has been asked for."""
        for _ in range(times):
            run.steps(1, answers=False)
            held, run.pool.waiting = run.pool.waiting[:-1], run.pool.waiting[-1:]
            for answer, future in held:
                answer.set_result(future.result())
            run.steps(1, answers=False)
        return run

    def test_an_answer_that_comes_within_two_intervals_makes_evaluations_rarer(self):
        run = self.late(Run(Asked(), adapt=True, may_move=True), 4)
        assert run.evaluations.counts.late == 3
        assert run.comparison.evaluate_every_n_steps == 4
        assert not run.pool.in_thread
        steps = [step for step, *_, loss in run.steps(8).policy.told if loss is not None]
        assert steps == [2, 4, 6, 8, 12, 16]
        (line,) = [text for text in run.told.lines if "3 evaluations in a row" in text]
        assert line.endswith("in time. Evaluations are 4 steps apart from now on")

    @pytest.mark.parametrize("adapt", [False, True])
    def test_a_process_that_does_not_answer_is_replaced_by_the_training_thread(self, adapt):
        run = Run(Asked(), adapt=adapt, may_move=True).steps(20, answers=False)
        # Steps 2, 4 and 6 are asked for, and the answers are due at steps 4, 6 and 8.
        assert list(run.policy.plasticity()) == list(range(8, 21, 2))
        assert run.comparison.evaluate_every_n_steps == 2
        counts = run.evaluations.counts
        assert (counts.late, counts.dropped, counts.failed, counts.done) == (3, 0, 0, 7)
        (line,) = [text for text in run.told.lines if "3 evaluations in a row" in text]
        assert "From step 8 on, the reference runs in the training thread" in line
        assert run.told.warnings == []

    def test_a_busy_process_has_no_answer_either(self):
        run = Run(Asked(), may_move=True).steps(2, answers=False)
        run.pool.busy = True
        run.steps(18, answers=False)
        assert (run.evaluations.counts.late, run.evaluations.counts.dropped) == (1, 2)
        assert list(run.policy.plasticity()) == list(range(8, 21, 2))

    def test_the_reference_in_the_thread_has_the_same_weights(self):
        expected = Run(Asked())
        expected.pool.submit = functools.partial(ReferenceRunner.submit, expected.pool)
        plasticity = expected.steps(12).policy.plasticity()
        run = Run(Asked(), may_move=True).steps(12, answers=False)
        assert run.policy.plasticity() == {step: plasticity[step] for step in (8, 10, 12)}

    def test_an_interval_is_doubled_once_where_the_reference_may_move(self):
        run = self.late(Run(Asked(), adapt=True, may_move=True), 4)
        run.steps(40, answers=False)
        assert run.pool.in_thread
        assert run.comparison.evaluate_every_n_steps == 4
        assert run.steps(4, answers=False).policy.plasticity()[run.step]

    def test_a_reference_that_may_not_move_is_asked_less_often(self):
        run = Run(Asked(), adapt=True).steps(60, answers=False)
        assert not run.pool.in_thread
        assert run.comparison.evaluate_every_n_steps == 16

    def test_an_interval_that_may_grow_is_as_long_as_an_answer_took(self):
        run = Run(Asked(), adapt=True).steps(2, answers=False)
        run.pool.busy = True
        assert run.steps(14, answers=False).comparison.evaluate_every_n_steps == 4
        run.pool.answer()  # of step 2, found at step 17
        run.pool.busy = False
        assert run.steps(6, answers=False).comparison.evaluate_every_n_steps == 15

    @pytest.mark.parametrize(("device", "in_thread"), [("cpu", True), ("cuda", False)])
    def test_beside_a_gpu_the_reference_stays_in_its_process(self, monkeypatch, device, in_thread):
        monkeypatch.setattr(comparison_module, "has_idle_core", lambda *_: True)
        _, comparison = set_up(background=None, device=device)
        moved = []
        comparison.evaluations.move_to_thread = lambda: moved.append(True)
        comparison.evaluations.unanswered_in_a_row = 3
        comparison.collect(comparison.next_evaluation)
        assert moved == [True] * in_thread
        assert comparison.evaluate_every_n_steps == (20 if in_thread else 40)

    def test_what_the_user_has_set_stays_with_a_warning(self):
        run = Run(Asked()).steps(40, answers=False)
        assert (run.pool.in_thread, run.comparison.evaluate_every_n_steps) == (False, 2)
        (warning,) = set(run.told.warnings)
        assert "Leave out evaluate_every_n_steps, which you set to 2, or leave a core idle" in warning

    def test_an_answer_in_time_begins_the_count_again(self):
        run = Run(Asked(), adapt=True, may_move=True)
        for _ in range(4):
            run.steps(5, answers=False).pool.answer()
            run.steps(1)
        assert run.evaluations.counts.late > 3
        assert (run.pool.in_thread, run.comparison.evaluate_every_n_steps) == (False, 2)

    def test_a_run_that_resumes_stays_in_the_training_thread(self, monkeypatch):
        monkeypatch.setattr(comparison_module, "has_idle_core", lambda *_: True)
        state = Run(Asked(), may_move=True).steps(10, answers=False).comparison.state_dict(with_reference=False)
        assert state["moved"] is True
        for before, in_process in ((state, False), ({**state, "moved": False}, True), (None, True)):
            _, comparison = set_up(before, background=None)
            comparison.refresh_reference()
            assert (comparison.runner.worker is not None) == in_process
            comparison.close()
        resumed = Run(Asked())
        resumed.comparison.load_state_dict(state)
        assert resumed.comparison.state_dict(with_reference=False)["moved"] is True

    def test_a_reference_that_cannot_move_has_failed(self):
        run = Run(Asked(), may_move=True).steps(6, answers=False)

        def fail(module):
            raise TypeError("cannot be copied")

        run.pool.move_to_thread = fail
        run.steps(2, answers=False)
        assert run.evaluations.counts.failed == 1
        assert "the reference model failed: TypeError: cannot be copied" in run.told.warnings[0]


@pytest.mark.parametrize(("refresh", "ages"), [(1, [2, 2, 2, 2]), (2, [2, 4, 2, 4]), (10, [2, 4, 6, 8])])
def test_the_reference_is_taken_anew_after_so_many_evaluations(refresh, ages):
    run, taken = Run(Asked(), refresh=refresh), [0]
    for _ in range(5):
        run.steps(2)
        if run.comparison.reference_age == 0:
            taken.append(run.step)
    assert [step - max(snapshot for snapshot in taken if snapshot < step) for step in (2, 4, 6, 8)] == ages


def test_the_reference_stays_while_the_policy_holds_it():
    run = Run(Asked(), refresh=1)
    ages = []
    for holds in (False, True, True, False, False):
        run.policy.held = holds
        ages.append(run.steps(2).comparison.reference_age)
    assert ages == [0, 1, 2, 0, 0]


def test_no_reference_while_the_policy_wants_none():
    policy = Asked()
    policy.wants_reference = False
    run = Run(policy).steps(6)
    assert not run.pool.has_snapshot
    assert run.policy.plasticity() == {}


def test_close_leaves_the_model_as_it_was():
    run = Run(Asked({3: Decision(2, "test")})).steps(5)
    run.observers.batch_start(None, run.step)
    for _ in range(2):
        run.comparison.close()
        run.freezer.close()
    assert all(parameter.requires_grad for parameter in run.net.parameters())
    assert not any("forward" in vars(module) for module in run.net.modules())


# --- where an argument is None --------------------------------------------------------------------------------------


def trainer(steps=1000, device="cpu"):
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(estimated_stepping_batches=steps, strategy=strategy, num_devices=1)


def set_up(state=None, told=None, device="cpu", **arguments):
    net = deep_mlp()
    freezer = Freezer(net, LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum()))
    given = {
        "evaluate_every_n_steps": None,
        "samples": 4,
        "precision": "auto",
        "background": False,
        "timeout_s": 7.0,
        "deterministic": None,
    }
    return net, comparison_of(trainer(device=device), freezer, Asked(), told or Told(), state, **given | arguments)


def precision_of(net, comparison):
    """The precision in which the reference answers."""
    comparison.refresh_reference()
    comparison.batch_start(None, comparison.next_evaluation - 1)
    comparison.forward_end(net(torch.rand(5, 4)).sum())
    comparison.collect(comparison.next_evaluation)
    comparison.optimizer_step(comparison.next_evaluation)
    comparison.collect(comparison.next_evaluation)
    return comparison.evaluations.precision


@pytest.mark.parametrize(("steps", "every"), [(10, 8), (500, 10), (50_000, 1000), (math.inf, 100), (-1, 100)])
def test_the_interval_follows_the_length_of_the_run(steps, every):
    assert evaluation_interval(trainer(steps)) == every


def test_a_given_interval_is_kept():
    assert set_up()[1].evaluate_every_n_steps == 20
    assert set_up(evaluate_every_n_steps=3)[1].evaluate_every_n_steps == 3


@pytest.mark.parametrize(("deterministic", "waits"), [(None, False), (False, False), (True, True)])
def test_a_deterministic_run_waits(deterministic, waits):
    assert set_up(deterministic=deterministic)[1].waits is waits


def test_the_setting_of_torch_is_the_default():
    torch.use_deterministic_algorithms(True)
    try:
        assert set_up()[1].waits
        assert not set_up(deterministic=False)[1].waits
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        ({"precision": "bf16"}, "bf16"),
        ({"deterministic": True}, "float32"),
        ({"deterministic": True, "state": {"precision": "bf16", "crops": None}}, "bf16"),
        ({"precision": "bf16", "state": {"precision": "float32", "crops": True}}, "float32"),
        ({"precision": "bf16", "state": {"precision": None, "crops": False}}, "bf16"),
    ],
)
def test_the_precision_of_the_checkpoint_comes_first(arguments, precision):
    assert precision_of(*set_up(**arguments)) == precision


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"deterministic": True}, "the run is deterministic"), ({"precision": "float32"}, "as requested")],
)
def test_the_reason_for_the_precision_is_told(arguments, reason):
    told = Told()
    precision_of(*set_up(told=told, **arguments))
    assert told.lines == [f"the reference model runs in float32: {reason}"]


@pytest.mark.parametrize("background", [False, True])
def test_the_reference_runs_where_it_is_told(background):
    _, comparison = set_up(background=background)
    comparison.refresh_reference()
    comparison.runner.ready()
    assert (comparison.runner.worker is not None) == background
    comparison.close()
