"""Checking the arguments of `KnowledgeGuidedFreezing`, and naming the policy of those that belong to one."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Concatenate, ParamSpec, TypeVar, get_args

from lightning_egeria.errors import ArgumentError, CheckpointError, check_integers, near_match
from lightning_egeria.freezing.policy import FreezingPolicy, Policy
from lightning_egeria.freezing.reference import Precision
from lightning_egeria.freezing.scripted import ScriptedPolicy
from lightning_egeria.freezing.slopes import SlopePolicy

_Self = TypeVar("_Self")
_Parameters = ParamSpec("_Parameters")


def explain_arguments_of_policies(
    init: Callable[Concatenate[_Self, _Parameters], None],
) -> Callable[Concatenate[_Self, _Parameters], None]:
    """Decorate ``__init__``: an argument that it does not have raises an error that names the policy or a near match.

    The signature stays explicit, for LightningCLI, Hydra and editors.
    """
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: _Self, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
        owner = type(self).__name__
        hints = {name: _hint(owner, name, known) for name in kwargs if name not in known}
        texts = [f"{owner} has no argument {name!r}.{hint}" for name, hint in hints.items() if hint]
        if texts:
            raise ArgumentError(" ".join(texts))
        init(self, *args, **kwargs)

    return checked


def check_arguments(
    policy: object, evaluate_every_n_steps: int | None, evaluation_samples: int, precision: str, timeout_s: float
) -> None:
    """Check the ranges of the arguments.

    Raises:
        ArgumentError: if an argument is out of range.
    """
    if isinstance(policy, type):
        raise ArgumentError(f"policy must be an instance, got the class {policy.__name__}. Write {policy.__name__}()")
    if policy is not None and not callable(getattr(policy, "observe", None)):
        raise ArgumentError(f"policy must be a policy such as FreezingPolicy(), got {policy!r}")
    if evaluate_every_n_steps is not None:
        check_integers(1, evaluate_every_n_steps=evaluate_every_n_steps)
    check_integers(2, evaluation_samples=evaluation_samples)
    if precision not in get_args(Precision):
        raise ArgumentError(f"reference_precision must be one of {get_args(Precision)}, got {precision!r}")
    if not timeout_s > 0:
        raise ArgumentError(f"timeout_s must be greater than 0, got {timeout_s}")


def check_max_loss(max_loss_points: float, policy: object) -> None:
    """Check the loss that the user accepts.

    Raises:
        ArgumentError: if it is negative or not a number, or the policy would ignore it.
    """
    if not max_loss_points >= 0:
        raise ArgumentError(f"max_loss_points must be at least 0, got {max_loss_points}")
    if max_loss_points and policy is not None and not (isinstance(policy, FreezingPolicy) and policy.trial):
        raise ArgumentError(
            f"max_loss_points sets how deep the trial of FreezingPolicy goes, and this {type(policy).__name__} makes "
            "none. Leave it out"
        )


def policy_for(given: Policy | None, written_with: str | None) -> Policy:
    """Return the policy of a `fit`, a copy of the given one.

    Args:
        given: the policy of the callback; None is ``FreezingPolicy()``.
        written_with: class name of the policy that wrote the checkpoint; None without a checkpoint.

    Raises:
        CheckpointError: if a policy of another class wrote the checkpoint.
    """
    policy = copy.deepcopy(given) if given is not None else FreezingPolicy()
    if written_with is not None and written_with != type(policy).__name__:
        raise CheckpointError(
            f"the checkpoint was written with a {written_with}, and this callback has a {type(policy).__name__}. Pass "
            "the same policy, or leave out ckpt_path to start again"
        )
    return policy


def _hint(owner: str, name: str, known: Collection[str]) -> str:
    policies = (FreezingPolicy, SlopePolicy, ScriptedPolicy)
    owners = {argument: policy for policy in reversed(policies) for argument in inspect.signature(policy).parameters}
    if name in owners:
        return f" It belongs to the policy: {owner}({owners[name].__name__}({name}=...))."
    near = difflib.get_close_matches(name, [*known, *owners], n=1)
    if near and near[0] in owners:
        return f" Did you mean {owner}({owners[near[0]].__name__}({near[0]}=...))?"
    return near_match(name, known)
