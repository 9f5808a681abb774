"""The runner: one evaluation at a time, a new process for one that died, the same numbers as in the calling thread."""

import copy
import functools
import os
import signal
import time

import pytest
import torch
from torch import nn

from lightning_egeria.core.network.calls import NetworkCall
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.errors import CheckpointError, WorkerError
from lightning_egeria.freezing.reference import EvaluationRequest, ReferenceModel
from lightning_egeria.freezing.runner import ReferenceRunner, has_idle_core
from support.models import slow


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 2))


@pytest.fixture
def runners(net):
    made = []
    chain = LayerChain.trace(net, lambda: net(torch.randn(4, 6)).sum())

    def make(background, precision="float32", timeout_s=60.0):
        reference = functools.partial(ReferenceModel, chain, 8, precision)
        made.append(ReferenceRunner(reference, chain.entries, background, timeout_s))
        return made[-1]

    yield make
    for runner in made:
        runner.drop_snapshot()
        runner.drop_snapshot()


def evaluation(net, seed=0, samples=8):
    """Of the network with other weights."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return EvaluationRequest([NetworkCall("", (torch.randn(samples, 6, generator=generator),), {})], {"": moved}, 0)


@pytest.mark.parametrize("precision", ["float32", slow("bf16")])
def test_a_process_gives_the_numbers_of_the_calling_thread(net, runners, precision):
    found = []
    for background in (False, True):
        torch.manual_seed(1)
        runner = runners(background, precision)
        plasticity = []
        for seed in range(4):
            if seed % 2 == 0:
                with torch.no_grad():
                    net[0].weight.copy_(torch.randn(5, 6))
                runner.take_snapshot(net)
            plasticity.append(runner.submit(evaluation(net, seed)).result(60).plasticity)
        found.append(plasticity)
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_a_busy_process_takes_nothing_more_and_never_blocks(net, runners):
    runner = runners(True)
    runner.take_snapshot(net)
    assert runner.ready()
    os.kill(runner.worker.pid, signal.SIGSTOP)
    answers = [runner.submit(evaluation(net, i)) for i in range(4)]
    assert [answer is None for answer in answers] == [False, True, True, True]
    assert not runner.ready()
    os.kill(runner.worker.pid, signal.SIGCONT)
    assert answers[0].result(60).samples == 8
    assert runner.submit(evaluation(net)) is not None


def test_a_dead_worker_fails_its_call_and_is_replaced(net, runners):
    runner = runners(True)
    runner.take_snapshot(net)
    expected = runner.submit(evaluation(net)).result(60).plasticity
    first = runner.worker.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerError, match="exit status -9"):
        runner.submit(evaluation(net)).result(60)
    answer = runner.submit(evaluation(net)).result(60)  # of a new process, which was given the snapshot
    assert answer.plasticity == expected
    assert runner.worker.pid != first


def test_a_hanging_worker_is_ended_after_its_time(net, runners):
    runner = runners(True, timeout_s=0.2)
    runner.take_snapshot(net)
    os.kill(runner.worker.pid, signal.SIGSTOP)
    answer = runner.submit(evaluation(net))
    assert runner.submit(evaluation(net)) is None
    time.sleep(0.3)
    assert runner.submit(evaluation(net)) is not None  # a new process has it
    with pytest.raises(WorkerError, match=r"no answer within 0\.2 s"):
        answer.result(60)


def test_what_travels_is_small(net, runners):
    runner = runners(False)
    runner.take_snapshot(net)
    runner.submit(evaluation(net)).result()
    weights = sum(t.nbytes for t in net.state_dict().values())
    inputs = 4 * 8 * 6
    assert weights + inputs < runner.evaluation_bytes < weights + inputs + 4000
    assert weights <= runner.snapshot_bytes < weights + 4000


def test_a_snapshot_from_a_checkpoint_gives_the_same_numbers(net, runners):
    first, second = runners(False), runners(False)
    first.take_snapshot(net)
    given = evaluation(net)
    expected = first.submit(given).result().plasticity
    kept = first.snapshot_tensors()
    with torch.no_grad():
        net[0].weight.mul_(-1)
    second.restore_snapshot(net, kept)
    assert second.submit(given).result().plasticity == expected
    for wrong in (
        {name: tensor for name, tensor in kept.items() if name != "0.weight"},
        {**kept, "0.weight": torch.zeros(2, 2)},
    ):
        with pytest.raises(CheckpointError, match=r"does not fit this model: '0\.weight' has shape \(5, 6\)"):
            second.restore_snapshot(net, wrong)


def test_a_restored_snapshot_takes_the_rest_from_the_module(net, runners):
    first, second = runners(False), runners(False)
    given, fresh = evaluation(net), copy.deepcopy(net)
    net.left_behind, net[2].table = [torch.zeros(3)], torch.ones(2)
    net[2].register_buffer("grows", torch.ones(4), persistent=False)
    fresh[2].register_buffer("grows", torch.ones(2), persistent=False)
    first.take_snapshot(net)
    second.restore_snapshot(fresh, first.snapshot_tensors())
    assert second.submit(given).result().plasticity == first.submit(given).result().plasticity
    assert second.snapshot_tensors().keys() == first.snapshot_tensors().keys()


def test_a_process_is_for_an_idle_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert has_idle_core(torch.device("cpu")) is False
    assert has_idle_core(torch.device("cuda")) is True
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert has_idle_core(torch.device("cpu")) is True
    assert has_idle_core(torch.device("cpu"), processes=2) is False
