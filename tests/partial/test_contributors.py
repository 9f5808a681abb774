"""The mean over contributors, against gradients that are computed one rank at a time."""

import copy
import itertools
import threading

import pytest
import torch
from torch import nn

from lightning_egeria.errors import ExchangeError, UnsupportedError
from lightning_egeria.methods.partial import exchange
from lightning_egeria.methods.partial.buckets import contributors_of
from lightning_egeria.methods.partial.exchange import ContributorMean
from support.models import mlp

BLOCKS = 3


torch.manual_seed(0)
FIRST = mlp(blocks=BLOCKS)


class ThreadRanks:
    """What `size` ranks share. `of(rank)` is the transport of one; `sent` lists each collective once."""

    def __init__(self, size):
        self.size = size
        self.sent = []
        self._lock = threading.Condition()
        self._open = {}  # number of a collective of a set of ranks: the tensors by rank

    def of(self, rank):
        return _Transport(self, rank)

    def run(self, function, timeout_s=60):
        """What ``function(transport)`` returned on each rank."""
        results = [None] * self.size

        def call(rank):
            try:
                results[rank] = function(self.of(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "the ranks wait for one another"
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


class _Transport:
    def __init__(self, shared, rank):
        self.shared, self.rank, self.size = shared, rank, shared.size
        self._count = {}
        self.closed = False

    def ensure(self, sets):
        pass

    def close(self):
        self.closed = True

    def start_sum(self, tensor, ranks):
        return self._start("sum", tensor, tuple(ranks), None)

    def start_broadcast(self, tensor, root, ranks):
        return self._start("broadcast", tensor, tuple(ranks), root)

    def _start(self, kind, tensor, ranks, root):
        assert self.rank in ranks
        order = kind if kind == "broadcast" and len(ranks) == self.size else ranks
        number = self._count[order] = self._count.get(order, 0) + 1
        with self.shared._lock:
            key = (ranks, order, number)
            kinds, tensors = self.shared._open.setdefault(key, (kind, {}))
            assert kinds == kind, "ranks start other collectives"
            tensors[self.rank] = tensor.clone()
            if len(tensors) == len(ranks):
                self.shared.sent.append((kind, ranks, tensor.nbytes))
                self.shared._lock.notify_all()
        return _Pending(self.shared, key, tensor, root)


class _Pending:
    def __init__(self, shared, key, tensor, root):
        self._shared, self._key, self._tensor, self._root = shared, key, tensor, root

    def wait(self):
        ranks, _, _ = self._key
        with self._shared._lock:
            _, tensors = self._shared._open[self._key]
            assert self._shared._lock.wait_for(lambda: len(tensors) == len(ranks), 30), "a rank did not come"
        if self._root is not None:
            self._tensor.copy_(tensors[self._root])
            return
        total = tensors[ranks[0]].clone()
        for rank in ranks[1:]:
            total += tensors[rank]
        self._tensor.copy_(total)


def network():
    return copy.deepcopy(FIRST)


def layers_of(net):
    return [list(net[2 * index].parameters()) for index in range(BLOCKS + 1)]


def loss_of(net, rank):
    generator = torch.Generator().manual_seed(rank)
    return net(torch.randn(5, 6, generator=generator)).square().mean()


def backward(net, rank, depth):
    for index in range(depth):
        net[2 * index].requires_grad_(False)
    loss_of(net, rank).backward()
    net.requires_grad_(True)


def one_at_a_time(depths):
    """The slow reference: each rank's gradients on its own, and the mean over those that have one."""
    found = []
    for rank, depth in enumerate(depths):
        net = network()
        backward(net, rank, depth)
        found.append([[p.grad for p in layer] for layer in layers_of(net)])
    means = []
    for index in range(BLOCKS + 1):
        ranks = contributors_of(depths, index)
        alike = zip(*(found[rank][index] for rank in ranks), strict=True)
        means.append([torch.stack(gradients).sum(0) / len(ranks) for gradients in alike])
    return means


def exchanged(depths, bucket_bytes):
    shared = ThreadRanks(len(depths))

    def gradients(transport):
        net = network()
        mean = ContributorMean(transport, layers_of(net), str, bucket_bytes)
        mean.begin(depths)
        backward(net, transport.rank, depths[transport.rank])
        mean.finish()
        received = mean.received(depths, transport.rank)
        return received, [[p.grad for p in layer] for layer in layers_of(net)]

    return shared, shared.run(gradients)


@pytest.mark.parametrize("early", [("cpu",), ()])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_gradient_is_the_mean_over_contributors(ranks, bucket_bytes, early, monkeypatch):
    monkeypatch.setattr(exchange, "EARLY_DEVICES", early)
    for depths in itertools.islice(itertools.product(range(BLOCKS), repeat=ranks), 0, None, ranks):
        expected = one_at_a_time(depths)
        shared, results = exchanged(depths, bucket_bytes)
        for index in range(BLOCKS + 1):
            for place in range(2):
                found = [
                    gradients[index][place] if contributors_of(depths, index) else None for _, gradients in results
                ]
                if found[0] is None:
                    continue
                assert all(torch.equal(gradient, found[0]) for gradient in found)  # ranks are equal to the bit
                if ranks == 2:
                    assert torch.equal(found[0], expected[index][place])
                torch.testing.assert_close(found[0], expected[index][place])
        sent = sum((2 * (len(r) - 1) if kind == "sum" else len(r) - 1) * size for kind, r, size in shared.sent)
        assert sum(received for received, _ in results) == pytest.approx(sent)


def alone(layers, depths=(0, 0), transport=None):
    mean = ContributorMean(transport or ThreadRanks(2).of(0), layers, lambda _: "net.weight")
    mean.begin(depths)
    return mean


def test_a_missing_gradient_is_told():
    net = network()
    mean = alone([*layers_of(net)[:-1], [nn.Parameter(torch.zeros(2))]])
    loss_of(net, 0).backward()
    with pytest.raises(ExchangeError, match=r"'net\.weight' has no gradient in this step, and the other ranks wait"):
        mean.finish()


def test_a_rank_that_failed_is_told():
    class Failing:
        def wait(self):
            raise RuntimeError("Connection closed by peer")

    net = network()
    transport = ThreadRanks(2).of(0)
    transport.start_sum = lambda *_: Failing()
    mean = alone(layers_of(net), transport=transport)
    loss_of(net, 0).backward()
    with pytest.raises(
        ExchangeError, match=r"rank 0 did not get the gradients .*closed by peer\. A rank has failed, or"
    ):
        mean.finish()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    alone([[embedding.weight], []])
    with pytest.raises(UnsupportedError, match=r"'net\.weight' has a sparse gradient, which cannot be exchanged"):
        embedding(torch.tensor([1])).sum().backward()


def test_a_second_gradient_in_one_backward_is_refused():
    net = network()
    alone(layers_of(net), depths=(0, 1))
    loss_of(net, 0).backward()
    with pytest.raises(UnsupportedError, match="received a second gradient in one backward"):
        loss_of(net, 0).backward()


def test_without_begin_nothing_is_sent():
    net = network()
    mean = alone(layers_of(net))
    mean.abort()
    loss_of(net, 0).backward()
    before = [p.grad.clone() for p in net.parameters()]
    mean.finish()
    assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))
    mean.close()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
