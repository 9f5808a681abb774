"""Ranks that are threads of one process, to test what they send without starting processes."""

import threading


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
