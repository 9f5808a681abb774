"""A graph pipeline under Lightning's Trainer trains an unchanged LightningModule as one process does."""

import pytest
import torch
import torch.distributed as dist

from lightning_egeria import GraphPipelineStrategy
from lightning_egeria.errors import ArgumentError
from support.pipelining.strategy_runs import (
    REFUSED,
    fit,
    in_stages,
    order_of_samples,
    refused,
    weights_of,
    with_freezing,
)
from support.ranks import all_well, in_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:The dirpath has changed.*")


@pytest.fixture(autouse=True)
def _ends_the_process_group():
    yield
    if dist.is_initialized():  # Lightning leaves it to the end of the process
        dist.destroy_process_group()


def close(one, other, what=""):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.slow
def test_three_ranks_train_as_one_process(tmp_path):
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "devices": 1}
    plain, trainer, notes = fit(tmp_path / "plain", **settings)
    expected = weights_of(plain)
    validated = trainer.validate(plain, verbose=False)[0]
    longer, _, _ = fit(tmp_path / "longer", epochs=4, resume=tmp_path / "plain" / "last.ckpt", **settings)
    results = all_well(in_ranks(3, in_stages, tmp_path, tmp_path / "plain"))
    for rank, found in enumerate(results):
        close(found["state"], expected)
        assert found["metrics"] == [pytest.approx(one, rel=1e-4) for one in notes.metrics]
        assert found["validated"] == pytest.approx(validated, rel=1e-4)
        held, state = found["held"]
        own = ("image.", "text.", ("head.", "scale"))[rank]
        assert held
        assert all(name.startswith(own) for name in held)
        assert [name for name in state if name != "scale"] == held
        close(found["resumed"], weights_of(longer), "resumed")
        close(found["second half"], found["whole"], "second half")
        close(*found["freezing"], "freezing")
        close(*found["search"], "search")
    # the checkpoint is the plain model's, and goes on without us
    best = torch.load(results[0]["best"], weights_only=True)
    expected_best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    close(best["state_dict"], expected_best["state_dict"])
    states, plain_states = (one["optimizer_states"][0]["state"] for one in (best, expected_best))
    assert states.keys() == plain_states.keys()
    for number, state in plain_states.items():
        close(states[number], state)
    again, _, _ = fit(tmp_path / "again", epochs=4, resume=tmp_path / "stages" / "last.ckpt", **settings)
    close(weights_of(again), weights_of(longer))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused(name, tmp_path):
    kind, arguments, message = REFUSED[name]
    assert message in refused(kind, arguments, tmp_path)


def test_other_methods_are_refused(tmp_path):
    assert "a graph pipeline runs without other methods" in with_freezing(tmp_path)


@pytest.mark.parametrize(("precision", "near"), [("32-true", 1e-4), ("bf16-mixed", 0.02)])
def test_one_process_trains_as_without_it(precision, near, tmp_path):
    plain, _, expected = fit(tmp_path / "plain", devices=1, precision=precision)
    strategy = GraphPipelineStrategy(devices=1, micro_batches=2)
    module, _, notes = fit(tmp_path / "one", strategy, precision=precision)
    for name, value in weights_of(module).items():
        torch.testing.assert_close(value, weights_of(plain)[name], rtol=near, atol=near)
    assert "trained_MulticlassF1Score_step" in expected.metrics[0]
    assert notes.metrics == [pytest.approx(one, rel=near, abs=near) for one in expected.metrics]


def test_samples_come_in_the_order_of_one_process(tmp_path):
    orders = []
    for strategy in ("auto", GraphPipelineStrategy(devices=1, micro_batches=2)):
        orders.append(order_of_samples(tmp_path, strategy))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["devices", "micro_batches"])
def test_wrong_arguments_are_named(name):
    with pytest.raises(ArgumentError, match=f"{name} must be an integer of at least 1, got 0"):
        GraphPipelineStrategy(**{name: 0})


@pytest.mark.parametrize("arguments", [{"devices": "auto"}, {"stages": ["a", "b"]}, {"stages": {"a": "net"}}])
def test_arguments_of_another_type_are_named(arguments):
    with pytest.raises(ArgumentError, match=f"{next(iter(arguments))} must"):
        GraphPipelineStrategy(**arguments)
