"""The savings of a run: put together from what was measured, and their table."""

import dataclasses
import io
import pickle
from types import SimpleNamespace

import pytest
from rich.console import Console

from lightning_egeria.core.profiling.costs import WARM_UP_STEPS, StepCosts
from lightning_egeria.core.training.freezer import Decision, FreezingEvent
from lightning_egeria.freezing.savings import LayerModuleSavings, Savings, savings_table, summarize, why_nothing_froze
from lightning_egeria.freezing.slopes import SlopePolicy
from support.freezing.held import Asked, Run

SAVINGS = Savings(
    layer_modules=(LayerModuleSavings("net.stem", 120, 0.123), LayerModuleSavings("net.block", None, None)),
    frozen_depth=1,
    step_seconds_before=0.2,
    step_seconds_after=0.15,
    evaluation_seconds=1.5,
    seconds_saved=12.5,
    evaluations_done=30,
    evaluations_late=4,
    evaluations_dropped=3,
    reference_precision="bf16",
    bytes_per_evaluation=1_234_567,
    bytes_per_snapshot=98_765_432,
)


def text(savings, metrics=None, width=80, **arguments):
    stream = io.StringIO()
    Console(file=stream, width=width).print(savings_table(savings, metrics or {}, **arguments))
    return stream.getvalue()


def test_the_table_has_five_sums_and_the_metrics():
    rows = [line.split("│")[1:3] for line in text(SAVINGS, {"val/acc": 0.98765}).splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["net.stem", "120"],
        ["net.block", "active"],
        ["frozen", "1/2"],
        ["step before the first freeze", "200.0 ms"],
        ["step after the last freeze", "150.0 ms"],
        ["evaluations", "30 of 37 (1.5 s)"],
        ["estimated time saved", "12.5 s"],
        ["val/acc", "0.9877"],
    ]


def test_details_on_request():
    several = dataclasses.replace(SAVINGS, gradient_bytes_before=2_000_000, gradient_bytes_after=50_000)
    printed = text(several, details=True)
    for word in ("12.3%", "12.5 s", "4, 3", "bf16", "1.2 MB", "98.8 MB", "2.00 MB -> 50.0 kB"):
        assert word in printed


def test_names_are_printed_as_they_are_at_80_columns():
    long = f"net.{'block.' * 20}[1]"
    savings = dataclasses.replace(SAVINGS, layer_modules=(LayerModuleSavings(long, 1, 0.5),))
    printed = text(savings, {"val/[red]": 1.0})
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "val/[red]" in printed
    assert long in "".join(line.split("│")[1].strip() for line in printed.splitlines() if line.startswith("│"))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"frozen_depth": 0, "seconds_saved": -0.3}, "nothing frozen"),
        ({"seconds_saved": -2.0}, "none (-2.0 s)"),
        ({"seconds_saved": None}, "not measured"),
    ],
)
def test_a_run_without_gain_says_so(changes, verdict):
    assert verdict in text(dataclasses.replace(SAVINGS, **changes))


def test_warm_up_and_compilation_do_not_change_the_step_time():
    costs = StepCosts()
    for seconds in [100.0] * WARM_UP_STEPS + [1.0, 500.0, 2.0, 2.5, 1.5]:
        costs.add(0, seconds, evaluated=False)
    costs.add(0, 50.0, evaluated=True)
    assert costs.median_seconds(0) == 2.0
    assert costs.median_seconds(1) is None
    assert costs.seconds_saved() == 0


def test_saved_time_counts_every_step_at_a_depth():
    costs = StepCosts()
    for depth, seconds in ((0, 2.0), (2, 1.0), (0, 2.0), (1, 1.5)):
        for _ in range(10):
            costs.add(depth, seconds, evaluated=False)
    assert costs.seconds_saved() == pytest.approx(10 * 1.0 + 10 * 0.5)


def test_costs_take_no_more_memory_the_longer_a_run_is():
    costs, sizes = StepCosts(), []
    for _ in range(2):
        for step in range(1000):
            costs.add(step % 2, 0.25, evaluated=False)
            costs.add_layer_seconds([0.125, 0.125])
        sizes.append(len(pickle.dumps(costs)))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("step", "shares"), [(8.0, [0.125, 0.25]), (2.0, [1 / 3, 2 / 3])])
def test_shares_of_a_step_are_never_more_than_the_step(step, shares):
    costs = StepCosts()
    for _ in range(WARM_UP_STEPS + 1):
        costs.add(0, step, evaluated=False)
    for seconds in ([0.9, 2.0], [1.0, 5.0], [7.0, 1.0]):
        costs.add_layer_seconds(seconds)
    assert costs.layer_shares(2) == pytest.approx(shares)


@pytest.fixture
def run():
    return Run(Asked())


def freeze(step, depth):
    return FreezingEvent(step, "freeze", depth, "")


def add(run, depth, seconds, steps):
    for _ in range(steps):
        run.comparison.costs.add(depth, seconds, evaluated=False)


def frozen_at(savings):
    return [module.frozen_at_step for module in savings.layer_modules]


def test_nothing_happened(run):
    savings = summarize(run.decider, [])
    assert savings.frozen_depth == 0
    assert frozen_at(savings) == [None, None, None]
    assert (savings.seconds_saved, savings.step_seconds_before, savings.step_seconds_after) == (None, None, None)
    assert (savings.evaluations_done, savings.evaluations_late, savings.evaluations_dropped) == (0, 0, 0)


def test_the_freeze_that_lasted_is_the_one_that_counts(run):
    events = [freeze(3, 1), freeze(5, 2), FreezingEvent(8, "unfreeze", 0, ""), freeze(11, 1), freeze(14, 2)]
    assert frozen_at(summarize(run.decider, events)) == [11, 14, None]
    assert summarize(run.decider, events).frozen_depth == 2


def test_a_layer_module_that_was_released_is_not_frozen(run):
    events = [freeze(3, 2), FreezingEvent(8, "unfreeze", 1, "")]
    assert frozen_at(summarize(run.decider, events)) == [3, None, None]


def test_seconds_are_those_of_the_steps_less_the_evaluations(run):
    add(run, 0, 4.0, WARM_UP_STEPS + 5)
    add(run, 1, 3.0, WARM_UP_STEPS + 5)
    run.comparison.costs.evaluation_seconds = 2.5
    savings = summarize(run.decider, [freeze(8, 1)])
    assert (savings.step_seconds_before, savings.step_seconds_after) == (4.0, 3.0)
    assert savings.evaluation_seconds == 2.5
    assert savings.seconds_saved == WARM_UP_STEPS + 5 - 2.5


def test_evaluations_are_counted():
    run = Run(Asked({7: Decision(1, "")})).steps(9)
    savings = summarize(run.decider, run.events)
    counts = run.evaluations.counts
    assert counts.done > 0
    assert savings.evaluations_done == counts.done
    assert savings.evaluations_dropped == counts.dropped
    assert savings.reference_precision == "float32"
    assert savings.bytes_per_evaluation > 0
    assert savings.bytes_per_snapshot > 0


def test_gradients_are_exchanged_only_between_several_ranks(run):
    savings = summarize(run.decider, [freeze(3, 1)])
    assert (savings.gradient_bytes_before, savings.gradient_bytes_after) == (None, None)
    run.freezer.ranks.size = 2
    savings = summarize(run.decider, [freeze(3, 1)])
    layer = (4 * 4 + 4) * 4  # bytes
    assert savings.gradient_bytes_before == 3 * layer + (4 * 2 + 2) * 4
    assert savings.gradient_bytes_after == savings.gradient_bytes_before - layer


class TestWhyNothingFroze:
    @pytest.mark.parametrize(
        ("counts", "reason"),
        [
            ({}, "the run ended before the first evaluation, after 2 steps. Lower evaluate_every_n_steps"),
            ({"done": 1, "late": 1, "dropped": 1}, "2 of 3 evaluations came late or were dropped. Leave a core idle"),
            ({"done": 1, "dropped": 2}, "2 of 3 evaluations were dropped. A warning says why"),
            ({"done": 1, "failed": 2}, "the reference model failed in 2 of 3 evaluations. A warning has the error"),
            ({"done": 3, "late": 2, "failed": 1}, "in 3 evaluations, no layer module stayed below the tolerance"),
        ],
    )
    def test_evaluations_that_are_missing_come_before_those_that_showed_learning(self, run, counts, reason):
        vars(run.evaluations.counts).update(counts)
        assert why_nothing_froze(run.decider).startswith(reason)
        assert summarize(run.decider, []).why_nothing_froze == why_nothing_froze(run.decider)
        assert summarize(run.decider, [freeze(3, 1)]).why_nothing_froze is None

    def test_what_comes_before_evaluations(self, run):
        decider = run.decider
        run.policy.held_back = "the learning rate is 1.0e-01, with a peak of 1.0e-01"
        assert why_nothing_froze(decider).startswith(f"{run.policy.held_back}. A model trained from scratch freezes")
        decider.declined = "no depth is worth it"
        assert why_nothing_froze(decider) == "no depth is worth it"
        decider.trial = SimpleNamespace(over=False)
        assert why_nothing_froze(decider).startswith("the run ended before depths could be tried")
        decider.max_depth = 0
        assert why_nothing_froze(decider).startswith("no layer module may freeze")

    def test_the_rule_of_the_paper_waits_for_the_loss(self, run):
        run.decider.policy = SlopePolicy()
        assert why_nothing_froze(run.decider).startswith("the training loss has not settled")

    def test_other_ranks_and_policies_that_measure_nothing_have_no_reason(self, run):
        run.policy.wants_reference = False
        assert why_nothing_froze(run.decider) is None
        run.policy.wants_reference, run.freezer.ranks = True, SimpleNamespace(leads=False)
        assert why_nothing_froze(run.decider) is None
