"""When the network is compared, and with which reference."""

import functools

import pytest
from held import Asked, Run

from lightning_egeria.freezing.runner import ReferenceRunner
from lightning_egeria.training.freezer import Decision


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


def test_two_late_answers_in_a_row_make_evaluations_rarer():
    run = Run(Asked(), adapt=True).steps(7, answers=False).steps(9)
    assert run.evaluations.counts.late == 2
    assert run.comparison.evaluate_every_n_steps == 4
    assert [step for step, *_, loss in run.policy.told if loss is not None] == [2, 4, 6, 10, 14]
    assert ["every 4 steps" in text for text in run.told.lines if "interval" in text] == [True]


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
