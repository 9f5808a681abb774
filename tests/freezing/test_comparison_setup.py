"""What a comparison takes from the run where an argument is None."""

import math
from types import SimpleNamespace

import pytest
import torch
from held import Asked, Told
from networks import deep_mlp

from lightning_egeria.freezing.comparison_setup import evaluation_interval, set_up_comparison
from lightning_egeria.network.chain import LayerChain
from lightning_egeria.training.freezer import Freezer


def trainer(steps=1000):
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(estimated_stepping_batches=steps, strategy=strategy)


def set_up(state=None, told=None, **arguments):
    net = deep_mlp()
    freezer = Freezer(net, LayerChain.trace(net, lambda: net(torch.rand(5, 4)).sum()))
    given = {
        "evaluate_every_n_steps": None,
        "evaluation_samples": 4,
        "reference_precision": "auto",
        "background": False,
        "timeout_s": 7.0,
        "deterministic": None,
    }
    chosen = SimpleNamespace(**given | arguments)
    return net, set_up_comparison(trainer(), freezer, Asked(), told or Told(), state, chosen)


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
        ({"reference_precision": "bf16"}, "bf16"),
        ({"deterministic": True}, "float32"),
        ({"deterministic": True, "state": {"precision": "bf16", "crops": None}}, "bf16"),
        ({"reference_precision": "bf16", "state": {"precision": "float32", "crops": True}}, "float32"),
        ({"reference_precision": "bf16", "state": {"precision": None, "crops": False}}, "bf16"),
    ],
)
def test_the_precision_of_the_checkpoint_comes_first(arguments, precision):
    assert precision_of(*set_up(**arguments)) == precision


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"deterministic": True}, "the run is deterministic"), ({"reference_precision": "float32"}, "as requested")],
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
