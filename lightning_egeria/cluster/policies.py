"""All policies, by the names that the command takes."""

from __future__ import annotations

from collections.abc import Callable

from lightning_egeria.cluster.fair import FairShare
from lightning_egeria.cluster.jobs import Policy
from lightning_egeria.cluster.optimus import Optimus
from lightning_egeria.cluster.pollux import Pollux
from lightning_egeria.cluster.queues import BackFill, FirstComeFirstServed, ShortestRemaining
from lightning_egeria.cluster.tiresias import Tiresias

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy
    for policy in (Pollux, Tiresias, Optimus, FirstComeFirstServed, BackFill, ShortestRemaining, FairShare)
}
