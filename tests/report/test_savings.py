"""The savings table."""

import dataclasses
import io
import pickle

import pytest
from rich.console import Console

from lightning_egeria.freezing.costs import WARM_UP_STEPS, StepCosts
from lightning_egeria.report import LayerModuleSavings, Savings, savings_table

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


def text(savings, metrics=None):
    stream = io.StringIO()
    Console(file=stream, width=100).print(savings_table(savings, metrics or {}))
    return stream.getvalue()


def test_every_number_is_there():
    printed = text(SAVINGS, {"val/acc": 0.98765})
    words = [
        "net.stem",
        "120",
        "12.3%",
        "active",
        "1/2",
        "200.0 ms",
        "150.0 ms",
        "30 (1.5 s)",
        "12.5 s",
        "0.9877",
        "4, 3",
    ]
    words += ["bf16", "1.2 MB each", "98.8 MB each"]
    for word in words:
        assert word in printed


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"frozen_depth": 0, "seconds_saved": -0.3}, "nothing frozen"),
        ({"seconds_saved": -2.0}, "nothing gained (-2.0 s)"),
        ({"seconds_saved": None}, "not measured"),
    ],
)
def test_a_run_without_gain_says_so(changes, verdict):
    assert verdict in text(dataclasses.replace(SAVINGS, **changes))


def test_steps_while_the_machine_settles_count_for_no_mean():
    costs = StepCosts()
    for seconds in [100.0] * WARM_UP_STEPS + [1.0, 3.0]:
        costs.add(0, seconds, evaluated=False)
    costs.add(0, 50.0, evaluated=True)
    assert costs.mean_seconds(0) == 2.0
    assert costs.mean_seconds(1) is None
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
