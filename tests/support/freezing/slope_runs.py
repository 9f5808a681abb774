"""Plasticity that a test writes down, fed to a `SlopePolicy`."""

import torch

from lightning_egeria.freezing.slopes import FIRST_SLOPES, SlopePolicy


def guided(max_depth: int = 3, window: int = 2, patience: int = 2, **kwargs) -> SlopePolicy:
    policy = SlopePolicy(window_evaluations=window, patience=patience, bootstrap=False, **kwargs)
    policy.start(max_depth)
    return policy


def evaluations_to_freeze(window: int, patience: int) -> int:
    """Evaluations until a plasticity that falls and then stays put freezes at the earliest."""
    return 2 * window - 2 + FIRST_SLOPES + patience


def falling_then_flat(place: int, flat_from: int = 6) -> float:
    return 2.0 ** -min(place, flat_from)


def moving(place: int) -> float:
    """A plasticity that changes as much in every evaluation."""
    return 100.0 - place


def feed(policy, table, learning_rate=0.1, loss=None, start=0):
    """Observe one row after the other; returns (place, depth) of every decision."""
    decisions = []
    for place, row in enumerate(table, start=start):
        decision = policy.observe(place, row, learning_rate, loss)
        if decision is not None:
            decisions.append((place, decision.depth))
    return decisions


def freeze(policy, learning_rate=0.1, depth=1):
    """Let the first ``depth`` layer modules converge while the others go on changing."""
    for place in range(60):
        row = [falling_then_flat(place) if index < depth else moving(place) for index in range(4)]
        if policy.observe(place, row, learning_rate, None):
            break
    assert policy.depth == depth
    return policy


def rates(make_scheduler, steps, base=0.1):
    """Learning rates of a real torch schedule, one per step."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=base)
    scheduler = make_scheduler(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found
