"""How much room entries may take."""

import dataclasses

from lightning_egeria.caching.store.rows import Precision


@dataclasses.dataclass
class Budget:
    """Bytes of memory that several loaders share; the first to ask gets what it needs.

    >>> budget = Budget(10)
    >>> budget.take(7), budget.take(7)
    (7, 3)
    """

    free: int

    def take(self, most: int) -> int:
        """Return how many bytes may be used, which are others' no longer."""
        taken = min(most, self.free)
        self.free -= taken
        return taken


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much room the entries of a loader may take, and in what precision they are kept.

    Attributes:
        max_bytes: of all stores.
        min_free_bytes: to leave free on the disk.
        host: for entries in the memory of the host.
        device_bytes: for entries in the memory of the device that trains.
        precision: of the entries.
    """

    max_bytes: int
    min_free_bytes: int
    host: Budget
    device_bytes: int
    precision: Precision | None = None
