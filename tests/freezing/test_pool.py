"""The pool: bounded, replaced when a worker dies, and the same numbers in a process as in the calling thread."""

import copy
import functools
import os
import signal
import time

import pytest
import torch
from torch import nn

from lightning_egeria.calls import NetworkCall
from lightning_egeria.errors import CheckpointError, WorkerError
from lightning_egeria.freezing.pool import ReferencePool, idle_workers
from lightning_egeria.freezing.reference import Evaluation, ReferenceModel
from lightning_egeria.layers import LayerChain


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 2))


@pytest.fixture
def pools(net):
    made = []
    chain = LayerChain.trace(net, lambda: net(torch.randn(4, 6)).sum())

    def make(workers, precision="float32", timeout_s=60.0):
        reference = functools.partial(ReferenceModel, chain, 8, precision)
        made.append(ReferencePool(reference, chain.entries, workers, 1, timeout_s))
        return made[-1]

    yield make
    for pool in made:
        pool.drop_snapshot()
        pool.drop_snapshot()


def evaluation(net, seed=0, samples=8):
    """Of the network with other weights."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Evaluation([NetworkCall("", (torch.randn(samples, 6, generator=generator),), {})], {"": moved}, 0)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_process_gives_the_numbers_of_the_calling_thread(net, pools, precision):
    found = []
    for workers in (0, 1):
        torch.manual_seed(1)
        pool = pools(workers, precision)
        plasticity = []
        for seed in range(4):
            if seed % 2 == 0:
                with torch.no_grad():
                    net[0].weight.copy_(torch.randn(5, 6))
                pool.take_snapshot(net)
            plasticity.append(pool.submit(evaluation(net, seed)).result(60).plasticity)
        found.append(plasticity)
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_a_full_pool_takes_nothing_more_and_never_blocks(net, pools):
    pool = pools(2)
    pool.take_snapshot(net)
    for worker in pool.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    answers = [pool.submit(evaluation(net, i)) for i in range(5)]
    assert [answer is None for answer in answers] == [False, False, True, True, True]
    for worker in pool.workers:
        os.kill(worker.pid, signal.SIGCONT)
    assert answers[0].result(60).samples == answers[1].result(60).samples == 8
    assert pool.submit(evaluation(net)) is not None


def test_a_dead_worker_fails_its_call_and_is_replaced(net, pools):
    pool = pools(1)
    pool.take_snapshot(net)
    expected = pool.submit(evaluation(net)).result(60).plasticity
    first = pool.workers[0].pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(WorkerError, match="exit status -9"):
        pool.submit(evaluation(net)).result(60)
    answer = pool.submit(evaluation(net)).result(60)  # of a new process, which was given the snapshot
    assert answer.plasticity == expected
    assert pool.workers[0].pid != first


def test_a_hanging_worker_is_ended_after_its_time(net, pools):
    pool = pools(1, timeout_s=0.2)
    pool.take_snapshot(net)
    os.kill(pool.workers[0].pid, signal.SIGSTOP)
    answer = pool.submit(evaluation(net))
    assert pool.submit(evaluation(net)) is None
    time.sleep(0.3)
    assert pool.submit(evaluation(net)) is not None  # a new process has it
    with pytest.raises(WorkerError, match=r"did not answer within 0\.2 s"):
        answer.result(60)


def test_what_travels_is_small(net, pools):
    pool = pools(0)
    pool.take_snapshot(net)
    pool.submit(evaluation(net)).result()
    weights = sum(t.nbytes for t in net.state_dict().values())
    inputs = 4 * 8 * 6
    assert weights + inputs < pool.evaluation_bytes < weights + inputs + 4000
    assert weights <= pool.snapshot_bytes < weights + 4000


def test_a_snapshot_from_a_checkpoint_gives_the_same_numbers(net, pools):
    first, second = pools(0), pools(0)
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
        with pytest.raises(CheckpointError, match=r"does not fit the model: of '0\.weight', of shape \(5, 6\)"):
            second.restore_snapshot(net, wrong)


def test_what_is_no_weight_is_of_the_module_that_a_snapshot_is_restored_to(net, pools):
    first, second = pools(0), pools(0)
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
    assert idle_workers(torch.device("cpu")) == 0
    assert idle_workers(torch.device("cuda")) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert idle_workers(torch.device("cpu")) == 1
