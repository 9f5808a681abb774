"""What each device of a plan does in one step, as a list of actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from lightning_egeria.errors import PlanError
from lightning_egeria.methods.pipelining.plan import Plan

Kind = Literal["F", "B", "RF", "SF", "RB", "SB"]


@dataclasses.dataclass(frozen=True)
class Action:
    """One action of a device.

    Attributes:
        kind: ``F`` forward, ``B`` backward; ``RF`` and ``SF`` receive and send activations, ``RB`` and ``SB``
            gradients. Receiving begins with the action, and ends before the computation that needs it.
        micro_batch: number of the micro-batch.
        stage: the other stage of a transfer; None for a computation.

    >>> print(Action("F", 3), Action("SF", 3, 5))
    F3 SF3:5
    """

    kind: Kind
    micro_batch: int
    stage: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f":{self.stage}" if self.stage is not None else "")


def computations(micro_batches: Sequence[int], in_flight: int, group: int = 1, learns: bool = True) -> list[Action]:
    """Return forwards and backwards of one device, in order.

    ``in_flight - group`` forwards warm up; then ``group`` forwards and ``group`` backwards take turns. With a group of
    1 this is 1F1B.

    Args:
        micro_batches: numbers of the micro-batches of this device.
        in_flight: micro-batches between forward and backward, at most.
        group: forwards in a row.
        learns: whether there are backwards.

    >>> print(*computations(range(4), in_flight=2))
    F0 F1 B0 F2 B1 F3 B2 B3
    >>> print(*computations(range(4), in_flight=4, group=2))
    F0 F1 F2 F3 B0 B1 B2 B3
    """
    forwards = [Action("F", number) for number in micro_batches]
    if not learns:
        return forwards
    backwards = [Action("B", number) for number in micro_batches]
    warm = max(0, in_flight - group)
    order = forwards[:warm]
    for start in range(0, len(forwards), group):
        order += forwards[warm + start : warm + start + group] + backwards[start : start + group]
    return order


def schedule(plan: Plan) -> list[list[Action]]:
    """Return the actions of each rank of a plan.

    A transfer begins one computation before the one that needs it, so that it runs beside the computation. Results are
    sent when they are there.

    Raises:
        PlanError: if the plan cannot run to its end, which no plan should be able to cause.
    """
    lists = [_actions(plan, rank) for rank in range(plan.devices)]
    check(plan, lists)
    return lists


def _actions(plan: Plan, rank: int) -> list[Action]:
    stage, replica = plan.place(rank)
    width = plan.stages[stage].width
    order = computations(
        range(replica, plan.micro_batches, width), plan.in_flight_of_a_device(stage), plan.group, plan.learns[stage]
    )
    actions: list[Action] = []
    for number, action in enumerate(order):
        if number == 0:
            actions += _receives(plan, stage, action)
        if number + 1 < len(order):
            actions += _receives(plan, stage, order[number + 1])
        actions.append(action)
        actions += _sends(plan, stage, action)
    return actions


def _receives(plan: Plan, stage: int, action: Action) -> list[Action]:
    if action.kind == "F":
        return [Action("RF", action.micro_batch, other) for other in plan.inputs(stage)]
    return [Action("RB", action.micro_batch, other) for other in plan.outputs(stage) if plan.learns[other]]


def _sends(plan: Plan, stage: int, action: Action) -> list[Action]:
    if action.kind == "F":
        return [Action("SF", action.micro_batch, other) for other in plan.outputs(stage)]
    return [Action("SB", action.micro_batch, other) for other in plan.inputs(stage) if plan.learns[other]]


def check(plan: Plan, lists: Sequence[Sequence[Action]]) -> None:
    """Check that lists of actions run to their end with the memory of the plan.

    Each micro-batch has its forward and backward once on its rank; what is sent is received once, in the same order
    between two ranks; no device waits for ever; no device has more micro-batches in flight than planned.

    Raises:
        PlanError: if not; the message names the rank and the action.
    """
    for rank, actions in enumerate(lists):
        _check_computations(plan, rank, actions)
    for forward in (True, False):
        _check_transfers(plan, lists, forward)
    _check_progress(plan, lists)


def _check_computations(plan: Plan, rank: int, actions: Sequence[Action]) -> None:
    stage, replica = plan.place(rank)
    mine = list(range(replica, plan.micro_batches, plan.stages[stage].width))
    flying, most, done = 0, 0, {"F": list[int](), "B": list[int]()}
    for action in actions:
        if action.kind in done:
            done[action.kind].append(action.micro_batch)
            flying += 1 if action.kind == "F" else -1
            most = max(most, flying)
    if done["F"] != mine or done["B"] != (mine if plan.learns[stage] else []):
        raise PlanError(f"rank {rank} does not run each of its micro-batches {mine} once: {done}")
    if plan.learns[stage] and most > plan.in_flight_of_a_device(stage):
        raise PlanError(
            f"rank {rank} has {most} micro-batches in flight, expected at most {plan.in_flight_of_a_device(stage)}"
        )


def _check_transfers(plan: Plan, lists: Sequence[Sequence[Action]], forward: bool) -> None:
    send, receive = ("SF", "RF") if forward else ("SB", "RB")
    sent: dict[tuple[int, int, int, int], list[int]] = {}
    received: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, actions in enumerate(lists):
        stage, _ = plan.place(rank)
        for action in actions:
            if action.stage is None or action.kind not in (send, receive):
                continue
            other = plan.rank(action.stage, action.micro_batch)
            table, key = (
                (sent, (rank, other, stage, action.stage))
                if action.kind == send
                else (received, (other, rank, action.stage, stage))
            )
            table.setdefault(key, []).append(action.micro_batch)
    for key in sent.keys() | received.keys():
        if sent.get(key) != received.get(key):
            raise PlanError(
                f"rank {key[0]} sends micro-batches {sent.get(key, [])} and rank {key[1]} receives "
                f"{received.get(key, [])}, expected the same in the same order"
            )


def _check_progress(plan: Plan, lists: Sequence[Sequence[Action]]) -> None:
    places, sent, moved = [0] * len(lists), set[tuple[int, str, int, int]](), True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            stage, _ = plan.place(rank)
            while places[rank] < len(actions):
                action = actions[places[rank]]
                if action.kind in ("F", "B"):
                    needed = {
                        (other.stage, "S" + action.kind, action.micro_batch, stage)
                        for other in actions
                        if other.kind == "R" + action.kind and other.micro_batch == action.micro_batch
                    }
                    if not needed <= sent:
                        break
                elif action.kind in ("SF", "SB") and action.stage is not None:
                    sent.add((stage, action.kind, action.micro_batch, action.stage))
                places[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(lists) if places[rank] < len(actions)]
    if stuck:
        rank = stuck[0]
        raise PlanError(f"ranks {stuck} wait forever: rank {rank} at {lists[rank][places[rank]]}")
