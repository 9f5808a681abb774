"""When each device computes what in one step: predicted from a plan, or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.schedules import Action, schedule


@dataclasses.dataclass(frozen=True)
class Span:
    """One computation of a device.

    Attributes:
        action: the computation.
        start: seconds from the start of the step.
        end: seconds from the start of the step.
    """

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The computations of each rank in one step, in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        spans = [span for rank in self.ranks for span in rank]
        return max(span.end for span in spans) - min(span.start for span in spans)

    @property
    def idle_share(self) -> float:
        """Share of the time of all devices in which they compute nothing."""
        busy = sum(span.end - span.start for rank in self.ranks for span in rank)
        return max(0.0, 1 - busy / (self.seconds * len(self.ranks)))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each rank, the micro-batches between forward and backward, at most; 0 where nothing has a backward."""
        most = []
        for rank in self.ranks:
            flying = [0]
            for span in rank:
                flying.append(flying[-1] + (1 if span.action.kind == "F" else -1))
            most.append(max(flying) if flying[-1] == 0 else 0)
        return tuple(most)

    def text(self, columns: int = 80) -> str:
        """Return a drawing in letters: digits for forwards, letters for backwards, dots for idle time.

        >>> from lightning_egeria.methods.pipelining.graph import Node, chain_of
        >>> from lightning_egeria.methods.pipelining.plan import Plan, Stage
        >>> nodes = [Node("a", 1, 1), Node("b", 1, 1)]
        >>> plan = Plan(chain_of(nodes), (Stage("0", (0,)), Stage("1", (1,))), micro_batches=2)
        >>> print(predict(plan).text(6))
        01.a.b
        .0a1b.
        """
        scale = columns / self.seconds
        lines = []
        for rank in self.ranks:
            line = ["."] * columns
            for span in rank:
                number = span.action.micro_batch
                sign = chr(ord("0") + number % 10) if span.action.kind == "F" else chr(ord("a") + number % 26)
                first, last = round(span.start * scale), max(round(span.start * scale) + 1, round(span.end * scale))
                for column in range(first, min(last, columns)):
                    line[column] = sign
            lines.append("".join(line))
        return "\n".join(lines)


def predict(plan: Plan, transfer_s: Callable[[int, int], float] = lambda first, second: 0.0) -> Timeline:
    """Return the timeline of one step as the costs of the plan have it.

    Args:
        plan: the plan.
        transfer_s: seconds from the end of a computation of the first stage until the second has its result.
    """
    lists = schedule(plan)
    order = [[action for action in actions if action.kind in ("F", "B")] for actions in lists]
    ended: dict[tuple[int, str, int], float] = {}  # stage, kind, micro-batch
    spans: list[list[Span]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                arrivals = _arrivals(plan, plan.place(rank)[0], action, ended, transfer_s)
                if arrivals is None:
                    break
                start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
                stage = plan.place(rank)[0]
                end = start + plan.seconds(stage)[0 if action.kind == "F" else 1]
                spans[rank].append(Span(action, start, end))
                ended[stage, action.kind, action.micro_batch] = end
                moved = True
    return Timeline(tuple(map(tuple, spans)))


def _arrivals(
    plan: Plan,
    stage: int,
    action: Action,
    ended: dict[tuple[int, str, int], float],
    transfer_s: Callable[[int, int], float],
) -> Sequence[float] | None:
    """Return when the inputs of a computation arrive; None if that is not known yet."""
    forward = action.kind == "F"
    others = plan.inputs(stage) if forward else [other for other in plan.outputs(stage) if plan.learns[other]]
    keys = [(other, action.kind, action.micro_batch) for other in others]
    if any(key not in ended for key in keys):
        return None
    return [ended[key] + (transfer_s(key[0], stage) if forward else transfer_s(stage, key[0])) for key in keys]
