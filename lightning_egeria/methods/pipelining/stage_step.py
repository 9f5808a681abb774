"""Running the actions of one rank in one step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_egeria.core.network.tracing import leaf_of, walk
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.pipelining.messages import wait
from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.schedules import Action
from lightning_egeria.methods.pipelining.seeding import seeded
from lightning_egeria.methods.pipelining.stages import StageWork
from lightning_egeria.methods.pipelining.timeline import Span
from lightning_egeria.methods.pipelining.tracing import tensors_of

Loss = Callable[[Any, Any], Tensor]
"""Called with the model's output and the micro-batch; returns the mean loss of its samples."""
Forms = dict[fx.Node, Any]
_NOTHING = torch.zeros(1)  # sent where a stage only waits for another


@dataclasses.dataclass
class StepResult:
    """What one rank has of a step: its part of the loss, its computations by its own clock, and what it raised."""

    loss: float = 0.0
    spans: list[Span] = dataclasses.field(default_factory=list)
    failure: Exception | None = None


@dataclasses.dataclass
class _Flying:
    """What is kept of a micro-batch between forward and backward."""

    inputs: dict[fx.Node, list[Tensor]]
    values: dict[fx.Node, Any]
    loss: Tensor | None


class StageStep:
    """One step of one rank.

    Args:
        work: the share of the rank.
        plan: the plan, for as many micro-batches as there are.
        parts: micro-batches and their weights in the loss.
        loss: computes the loss of a micro-batch.
        number: number of the step.
        forms: for each micro-batch, what is sent and received: trees with tensors on the meta device.

    Attributes:
        result: what it has so far.
    """

    def __init__(
        self,
        work: StageWork,
        plan: Plan,
        parts: Sequence[tuple[Any, float]],
        loss: Loss,
        number: int,
        forms: Sequence[Forms],
    ) -> None:
        self.result = StepResult()
        self._work, self._plan, self._parts, self._loss, self._number = work, plan, parts, loss, number
        self._stage, self._forms, self._is_checked = work.stage, forms, False
        self._received: dict[tuple[str, int], list[tuple[int, list[Tensor], list[Any]]]] = {}
        self._flying: dict[int, _Flying] = {}
        self._back: dict[int, dict[fx.Node, list[Tensor]]] = {}
        self._sending: dict[tuple[str, int], list[tuple[Any, Tensor, int]]] = {}

    def do(self, action: Action) -> None:
        """Do one action of the schedule. After a failure, this rank still receives, and sends zeros."""
        if action.kind in ("RF", "RB"):
            self._receive(action)
        elif action.kind in ("SF", "SB"):
            self._send(action)
        else:
            arrived = [(stage, tensors) for stage, tensors, works in self._arrived(action)]
            if self.result.failure is not None:
                return
            started = time.perf_counter()
            try:
                (self._forward if action.kind == "F" else self._backward)(action.micro_batch, dict(arrived))
            except Exception as error:  # of the user's model or loss; told to all ranks at the end of the step
                self.result.failure = error
            self.result.spans.append(Span(action, started, time.perf_counter()))

    def finish(self) -> None:
        """Wait until everything is sent."""
        for key in list(self._sending):
            self._finish(key)

    def _finish(self, key: tuple[str, int]) -> None:
        for work, _, rank in self._sending.pop(key, []):
            wait(work, rank)

    # transfers

    def _tensors(self, action: Action) -> list[Tensor]:
        """Return the forms of what an action transfers: of gradients, floating-point ones only."""
        assert action.stage is not None, "a transfer has another side"
        pair = (self._stage, action.stage)
        edge = pair if action.kind in ("SF", "RB") else (pair[1], pair[0])
        forms = self._forms[action.micro_batch]
        leaves = [leaf for node in self._work.sent[edge] for leaf in tensors_of(forms[node])]
        if action.kind.endswith("B"):
            leaves = [leaf for leaf in leaves if leaf.is_floating_point()]
        return leaves or [_NOTHING]

    def _tag(self, action: Action) -> int:
        return action.micro_batch * 2 + action.kind.endswith("B")

    def _receive(self, action: Action) -> None:
        assert action.stage is not None, "a transfer has another side"
        rank = self._plan.rank(action.stage, action.micro_batch)
        buffers = [torch.empty(form.shape, dtype=form.dtype) for form in self._tensors(action)]
        works = [(dist.irecv(buffer, rank, tag=self._tag(action)), rank) for buffer in buffers]
        self._received.setdefault((action.kind[1], action.micro_batch), []).append((action.stage, buffers, works))

    def _arrived(self, action: Action) -> list[tuple[int, list[Tensor], list[Any]]]:
        found = self._received.pop((action.kind, action.micro_batch), [])
        for _, _, works in found:
            for work, rank in works:
                wait(work, rank)
        return found

    def _send(self, action: Action) -> None:
        assert action.stage is not None, "a transfer has another side"
        rank = self._plan.rank(action.stage, action.micro_batch)
        forms = self._tensors(action)
        tensors = [torch.zeros(form.shape, dtype=form.dtype) for form in forms]
        if self.result.failure is None:
            found = self._activations(action) if action.kind == "SF" else self._gradients(action)
            if [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in forms]:
                tensors = found
            else:
                self.result.failure = UnsupportedError(
                    f"a module returns shapes {[tuple(one.shape) for one in found]} and returned "
                    f"{[tuple(one.shape) for one in forms]} for a micro-batch of the same shape"
                )
        key = (action.kind, action.micro_batch)
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            self._sending.setdefault(key, []).append((dist.isend(sent, rank, tag=self._tag(action)), sent, rank))
        if not self._work.learns:  # no other stage makes this stage wait
            ahead = self._plan.in_flight_of_a_device(self._stage) * self._plan.stages[self._stage].width
            self._finish(("SF", action.micro_batch - ahead))

    def _activations(self, action: Action) -> list[Tensor]:
        flying = self._flying[action.micro_batch]
        nodes = self._work.sent[self._stage, action.stage or 0]
        found = [leaf for node in nodes for leaf in tensors_of(flying.values[node])]
        if not self._work.learns and action.stage == self._plan.outputs(self._stage)[-1]:
            del self._flying[action.micro_batch]
        return found or [_NOTHING]

    def _gradients(self, action: Action) -> list[Tensor]:
        inputs = self._back[action.micro_batch]
        leaves = [leaf for node in self._work.sent[action.stage or 0, self._stage] for leaf in inputs[node]]
        found = [leaf for leaf in leaves if leaf.is_floating_point()]
        return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in found] or [_NOTHING]

    # computing

    def _forward(self, number: int, arrived: dict[int, list[Tensor]]) -> None:
        inputs: dict[fx.Node, list[Tensor]] = {}
        for stage, tensors in arrived.items():
            left = iter(tensors)
            for node in self._work.sent[stage, self._stage]:
                inputs[node] = [next(left) for _ in tensors_of(self._forms[number][node])]
                for leaf in inputs[node]:
                    leaf.requires_grad_(self._plan.learns[stage] and leaf.is_floating_point())
        learns = self._work.learns and not self._work.recomputes
        with torch.set_grad_enabled(learns):
            values = self._computed(number, inputs)
            loss = self._loss_of(number, values) if self._work.has_loss else None
        if not learns:
            torch.clear_autocast_cache()  # of casts without gradients
        kept = {node: values[node] for nodes in self._work.sent.values() for node in nodes if node in values}
        self._flying[number] = _Flying(inputs, kept, loss)

    def _computed(self, number: int, inputs: dict[fx.Node, list[Tensor]]) -> dict[fx.Node, Any]:
        forms = self._forms[number]
        values = {node: _filled(forms[node], leaves) for node, leaves in inputs.items()}
        self._work.compute(values, self._parts[number][0], (self._number, number))
        return values

    def _loss_of(self, number: int, values: dict[fx.Node, Any]) -> Tensor:
        batch, weight = self._parts[number]
        with seeded(self._work.seed, self._number, number, -1):
            loss = self._loss(values[self._work.traced.output], batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:  # type: ignore[redundant-expr]  # as the user gave it
            raise UnsupportedError(f"loss_fn must return a tensor with one number, got {type(loss).__name__}")
        if self._work.learns and not self._is_checked:
            _check_reads(loss, self._work.parameters)
            self._is_checked = True
        self.result.loss += float(loss.detach()) * weight
        return loss

    def _backward(self, number: int, arrived: dict[int, list[Tensor]]) -> None:
        self._finish(("SF", number))
        flying = self._flying.pop(number)
        values, buffers = flying.values, list[tuple[Tensor, Tensor]]()
        if self._work.recomputes:  # with the same random numbers, and without a second change of running statistics
            buffers = [(buffer, buffer.clone()) for buffer in self._work.buffers()]
            with torch.enable_grad():
                values = self._computed(number, flying.inputs)
        ends, gradients = list[Tensor](), list[Tensor]()
        if flying.loss is not None and flying.loss.requires_grad:
            ends.append(flying.loss)
            gradients.append(torch.full_like(flying.loss, self._parts[number][1]))
        for stage, tensors in arrived.items():
            nodes = self._work.sent[self._stage, stage]
            leaves = [leaf for node in nodes for leaf in tensors_of(values[node]) if leaf.is_floating_point()]
            for leaf, gradient in zip(leaves, tensors, strict=False):
                if leaf.requires_grad:
                    ends.append(leaf)
                    gradients.append(gradient)
        if ends:
            with torch.autocast(ends[0].device.type, enabled=False):  # operations have the dtypes of the forward
                torch.autograd.backward(ends, gradients)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self._back[number] = flying.inputs


def _filled(form: Any, tensors: Sequence[Tensor]) -> Any:
    left = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(left), form)


def _check_reads(loss: Tensor, parameters: set[int]) -> None:
    """Check that a loss trains something, and only parameters of this stage."""
    if loss.grad_fn is None:
        raise UnsupportedError("the loss depends on no parameter that trains. Compute it from the output of the model")
    for node in walk([loss.grad_fn], set()):
        leaf = leaf_of(node)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in parameters:
            raise UnsupportedError(
                f"the loss reads a parameter of shape {tuple(leaf.shape)} that this stage does not train. Move "
                "everything with parameters into the model, call its module there, and return the inputs of the loss"
            )
