"""A stream that is driven batch by batch, without Lightning."""

import copy
import weakref

import torch
from fronts import new_front
from programs.parts import BATCH, Net, vectors

from lightning_egeria.caching.front import Front
from lightning_egeria.caching.loading import PlannedDataset
from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.caching.stream import Stream
from lightning_egeria.stores.directory import CacheDirectory
from lightning_egeria.stores.limits import Budget, Limits
from lightning_egeria.training.notices import Notices

_LOADED = weakref.WeakKeyDictionary()


class Counting:
    """Notes the samples that are loaded, where the cache does not look."""

    def __init__(self, data):
        self.data = data
        _LOADED[self] = []

    @property
    def loaded(self):
        return _LOADED[self]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.data[index]


class Drive:
    """A network, a data set and a stream between them.

    Attributes:
        stream: the stream.
        net: the network, frozen to a depth.
        plain: an equal one without the cache.
        data: the data set, a `Counting`.
        batches: the batches under the cache, in order.
    """

    def __init__(self, folder, data=None, depth=2, net=None, observes=lambda ahead: False, views=0, **limits):
        torch.manual_seed(0)
        self.net = (net or Net()).eval()
        self.plain = copy.deepcopy(self.net)
        self.data = Counting(vectors() if data is None else data)
        self.planned = PlannedDataset(self.data, torch.utils.data.default_collate)
        host = Budget(limits.pop("host_bytes", 10**9))
        room = Limits(**{"max_bytes": 10**9, "min_free_bytes": 0, "host": host, "device_bytes": 0} | limits)
        directory, self.notices = CacheDirectory(folder / "cache"), Notices("cache")

        def load(loaded, places):
            return self.planned.tensors(loaded.plan, places)

        self.stream = Stream(
            "training", self.planned, directory, room, views, 0, observes, load, self.notices, CacheStats()
        )
        self.front, self.batches = new_front(depth, self.net), []
        self.stream.start(self.front, keep=False)
        self.epochs = 0

    def epoch(self, order=None, size=BATCH, epochs=None, step=None):
        """Run an epoch in batches; return their outputs."""
        order = list(range(len(self.data))) if order is None else order
        self.stream.begin_epoch(self.epochs, epochs, False)
        self.epochs += 1
        return [self.batch(order[start : start + size], step) for start in range(0, len(order), size)]

    def batch(self, ids, step=None):
        """Run one batch; return what the network returned."""
        loaded = self.planned.__getitems__(self.stream.last_look(self.stream.plan(ids)))
        batch, cached = self.stream.receive(loaded, 0.0)
        self.batches.append(cached)
        if self.front is not None and cached is not None:
            self.front.begin(cached)
        output = step(self.net, *batch) if step is not None else self.net(batch[0])
        if self.front is not None:
            self.front.end()
        if cached is not None:
            cached.finish()
        return output

    def freeze(self, depth):
        """Freeze to another depth."""
        self.front.end()
        prefix = self.front.prefix
        prefix.set_depth(depth)
        self.front = Front(prefix, depth)
        self.stream.start(self.front, keep=True)

    @property
    def stats(self):
        return self.stream.stats

    def settle(self):
        """Wait until everything is written."""
        self.stream.levels.recording.finish()

    def close(self, remove=False):
        self.stream.close(remove)
        if self.front is not None:
            self.front.end()


def recorded(drive, **arguments):
    """Run an epoch in which everything is computed, and forget what was loaded."""
    drive.epoch(**arguments)
    drive.settle()
    drive.data.loaded.clear()
    return drive
