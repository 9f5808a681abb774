"""What the user's hooks may do with a batch outside the training step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BatchHooks:
    """What hooks may do with the batches of a run.

    Attributes:
        change: whether one may change a batch between the data loader and the training step, now or later.
        reason: why inputs have to be loaded, with the name of the hook; None: no hook needs them.
    """

    change: bool = False
    reason: str | None = None
