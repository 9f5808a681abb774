"""A graph pipeline over the processes of a job."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_egeria.errors import ArgumentError, PipelineError, PlanError, UnsupportedError
from lightning_egeria.pipelining.costs import measured_graph
from lightning_egeria.pipelining.executor import Loss, StageExecutor, form_of
from lightning_egeria.pipelining.graph import ComputationGraph
from lightning_egeria.pipelining.messages import lost_connection
from lightning_egeria.pipelining.plan import Plan, Stage, in_running_order
from lightning_egeria.pipelining.planner import Limits, plan_graph
from lightning_egeria.pipelining.timeline import Span
from lightning_egeria.pipelining.tracing import Forward, TracedModel, check_stages, find_units, tensors_of

_MESSAGE = 600  # bytes of a failed rank's message


_MESSAGE = 600  # bytes of a failed rank's message


class GraphPipeline:
    """Computes the gradients of a model in stages that form a graph, one process for each device.

    Every process creates it with the same model, and calls `step` with the same batches. Afterwards the parameters of
    this process's stage have gradients, and the others have none: the optimizer, over all parameters, skips them.
    `gather` brings the trained values of all stages to all processes.

    Args:
        model: the model, on the CPU.
        example_batch: a batch; its first micro-batch is run to trace, check and measure the model.
        devices: number of processes; None for as many as there are. Another number is refused.
        micro_batches: number of parts of a batch.
        stages: module paths of each stage, by its name; None plans them.
        forward: called with the model and a micro-batch; returns the output. None calls ``model(micro_batch)``.
        limits: memory, width and group of planned stages; replaces ``devices`` and ``micro_batches``.
        plan: a plan over the same modules, such as an earlier one from JSON; None makes one.

    Attributes:
        plan: the plan.
        spans: this process's computations in the last step, by its own clock.

    Raises:
        ArgumentError: if an argument is wrong.
        PlanError: if stages wait for each other in a circle, or nothing fits into memory.
        UnsupportedError: if the model or set-up is not supported; the message has the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        example_batch: Any,
        devices: int | None = None,
        micro_batches: int = 8,
        stages: Mapping[str, Sequence[str]] | None = None,
        forward: Forward | None = None,
        limits: Limits | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if self._several else (0, 1)
        self._check_setup(model, devices)
        self._limits = limits or Limits(self._size, micro_batches)
        if self._limits.devices != self._size:
            raise ArgumentError(f"limits.devices must be the number of processes, {self._size}, got {limits}")
        self.model, self.spans, self._steps = model, list[Span](), 0
        self._seed = int(self._shared(torch.tensor(torch.initial_seed() % 2**62)))
        example = split(example_batch, self._limits.micro_batches)[0][0]
        call = forward or (lambda model, batch: model(batch))
        if stages is not None:
            check_stages(model, stages)
            self._traced = TracedModel(model, call, [path for paths in stages.values() for path in paths])
        else:
            self._traced = _traced(model, call, self._size)
        if not self._traced.reads(self._traced.output):
            raise UnsupportedError(
                "the output of the model depends on no module with parameters. Return it from forward"
            )
        with _unchanged(model):
            expected = call(model, example)
        before = [buffer.clone() for buffer in model.buffers()]
        with _unchanged(model):
            _check_alike(expected, self._traced.find_random(example))
            pairs = zip(before, model.buffers(), strict=True)
            has_statistics = not all(torch.equal(old, new) for old, new in pairs)
            graph, self._groups = measured_graph(self._traced, model, example)
        self._example = example
        if plan is None:
            plan = self._named(graph, stages) if stages is not None else plan_graph(graph, self._limits)
        elif [node.name for node in plan.graph.nodes] != [node.name for node in graph.nodes]:
            raise PlanError(f"the plan is for other modules, expected {[node.name for node in graph.nodes]}")
        else:
            plan = dataclasses.replace(plan, graph=graph)
        plan = self._plan_of_rank_0(plan)
        if has_statistics and any(stage.width > 1 for stage in plan.stages):
            raise UnsupportedError(
                "a stage has several devices and the model has batch statistics, which they would not share. Pass "
                "limits with max_width=1"
            )
        self._use(plan)

    def _check_setup(self, model: nn.Module, devices: int | None) -> None:
        if devices is not None and devices != self._size:
            raise ArgumentError(f"devices must be the number of processes, {self._size}, got {devices}")
        if self._several and dist.get_backend() != "gloo":
            raise UnsupportedError(f"graph pipelines run with the back end gloo, got {dist.get_backend()}")
        if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
            raise UnsupportedError("graph pipelines run on the CPU in this version. Leave the model there")

    def _named(self, graph: ComputationGraph, stages: Mapping[str, Sequence[str]]) -> Plan:
        home = {path: name for name, paths in stages.items() for path in paths}
        nodes: dict[str, list[int]] = {name: [] for name in stages}
        for number, group in enumerate(self._groups):
            names = {home[unit] for unit in group}
            if len(names) > 1:
                raise PlanError(
                    f"stages {sorted(names)} wait for each other in a circle. Move modules so that they do not"
                )
            nodes[names.pop()].append(number)
        idle = [name for name, found in nodes.items() if not found]
        if idle:
            raise ArgumentError(f"stages: the model calls no module of stage {idle[0]!r}")
        names_in_order = [list(nodes)[number] for number in in_running_order(graph, list(nodes.values()))]
        found = tuple(Stage(name, tuple(nodes[name])) for name in names_in_order)
        return Plan(graph, found, self._limits.micro_batches, self._limits.group)

    def _plan_of_rank_0(self, plan: Plan) -> Plan:
        text = plan.to_json().encode()
        size = int(self._shared(torch.tensor(len(text))))
        data = torch.frombuffer(bytearray(text.ljust(size)[:size]), dtype=torch.uint8)
        shared = Plan.from_json(bytes(self._shared(data).numpy()).decode())
        if [node.name for node in shared.graph.nodes] != [node.name for node in plan.graph.nodes]:
            raise PipelineError(f"rank {self._rank} has another model than rank 0. Create the same one on all ranks")
        if shared.devices != self._size:
            raise PlanError(f"the plan has stages for {shared.devices} processes, and there are {self._size}")
        return shared

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        self._traced_modes = self._modes()
        home = {node: number for number, stage in enumerate(plan.stages) for node in stage.nodes}
        self._stage_of = {unit: home[node] for node, group in enumerate(self._groups) for unit in group}
        last = self._traced.reads(self._traced.output)[-1]
        loss_stage = self._stage_of[self._traced.unit_of[last]]
        ranks = [
            StageExecutor(self._traced, plan, self._stage_of, loss_stage, rank, self._seed)
            for rank in range(self._size)
        ]
        self._executor = ranks[self._rank]
        self._users = {
            name: tuple(rank for rank in range(self._size) if id(parameter) in ranks[rank].parameters)
            for name, parameter in self.model.named_parameters()
        }
        teams = sorted({ranks for ranks in self._users.values() if len(ranks) > 1})
        self._teams: dict[tuple[int, ...], Any] = {
            ranks: dist.new_group(list(ranks)) for ranks in teams
        }  # on every rank, part of it or not

    def step(self, batch: Any, loss_fn: Loss) -> Tensor:
        """Compute the loss and the gradients of a batch.

        Gradients are added to those that are there, as `Tensor.backward` does. A frozen parameter is noticed here: its
        stage stops its backward, and stages stay where they are.

        Args:
            batch: tensors with samples along the first dimension, in any tree; the same on all ranks.
            loss_fn: called with the output and the micro-batch; returns the mean loss of its samples.

        Returns:
            The loss of the batch, on all ranks.

        Raises:
            PipelineError: if a rank failed, on all ranks with the same message, or if it got another batch.
        """
        parts = split(batch, self.plan.micro_batches)
        self._check_same(batch)
        if self._modes() != self._traced_modes:
            self._follow_modes()
        self._steps += 1
        for part, _ in parts:
            if not self._executor.knows(part):
                with _unchanged(self.model):
                    failure = self._executor.learn_forms(part)
                self._agree(failure, 0.0)
        shared = [(name, p) for name, p in self.model.named_parameters() if len(self._users[name]) > 1]
        before = {name: parameter.grad for name, parameter in shared}
        for _, parameter in shared:
            parameter.grad = None
        result = self._executor.step(parts, loss_fn, self._steps)
        self.spans = result.spans
        loss = self._agree(result.failure, result.loss)
        self._sum_shared()
        for name, parameter in shared:
            old = before[name]
            if old is not None:
                parameter.grad = old if parameter.grad is None else old + parameter.grad
        return torch.tensor(loss, dtype=torch.float64)

    def gather(self) -> None:
        """Bring parameters and buffers of all stages to all processes, such as before validation or a checkpoint.

        Every process must call it. `model.state_dict()` is then that of the plain model.
        """
        if not self._several:
            return
        for name, parameter in self.model.named_parameters():
            if self._users[name]:
                dist.broadcast(parameter.data, self._users[name][0])
        for name, buffer in self.model.named_buffers():
            homes = [home for unit, home in self._stage_of.items() if name.startswith(f"{unit}.")]
            if homes:
                dist.broadcast(buffer, self.plan.ranks(homes[0])[0])

    def _modes(self) -> str:
        learns = (str(int(parameter.requires_grad)) for parameter in self.model.parameters())
        return "".join(learns) + "".join(str(int(module.training)) for module in self.model.modules())

    def _follow_modes(self) -> None:
        """Keep the stages, with backwards for those that learn now, and draw random numbers where modules do now."""
        with _unchanged(self.model):
            self._traced.find_random(self._example)
            graph, _ = measured_graph(self._traced, self.model, self._example)
        self._use(self._plan_of_rank_0(dataclasses.replace(self.plan, graph=graph)))

    def _check_same(self, batch: Any) -> None:
        digest = xxhash.xxh3_64(f"{form_of(batch)} {self._modes()}".encode())
        for leaf in tensors_of(batch):
            digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        own = torch.tensor(digest.intdigest() >> 1)
        if len({int(one) for one in self._gathered(own)}) > 1:
            raise PipelineError(
                "the ranks did not get the same batch, or froze other parameters. Give each rank the whole batch: no "
                "DistributedSampler, and the same seed for shuffling"
            )

    def _agree(self, failure: Exception | None, loss: float) -> float:
        """Return the sum of the losses of all ranks; raise the same error on all if one failed."""
        found = self._gathered(torch.tensor([failure is not None, loss], dtype=torch.float64))
        failed = [rank for rank, (flag, _) in enumerate(found) if flag]
        if failed:
            rank = failed[0]
            text = f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE].ljust(_MESSAGE)
            shared = self._shared(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank)
            stage = self.plan.stages[self.plan.place(rank)[0]].name
            told = bytes(shared.numpy()).decode(errors="replace").strip()
            raise PipelineError(f"rank {rank}, stage {stage!r}, failed: {told}") from failure
        return float(sum(value for _, value in found))

    def _sum_shared(self) -> None:
        """Sum the gradients of weights that several ranks use: devices of one stage, and tied weights."""
        parameters = dict(self.model.named_parameters())
        for ranks, group in self._teams.items():
            if self._rank not in ranks:
                continue
            for name, users in self._users.items():
                weight = parameters[name]
                if users != ranks or not weight.requires_grad:
                    continue
                own = weight.grad if weight.grad is not None else torch.zeros_like(weight)
                flat = torch.cat([own.reshape(-1), own.new_tensor([weight.grad is not None])])
                dist.all_reduce(flat, group=group)
                weight.grad = flat[:-1].view_as(weight).clone() if flat[-1] else None

    def _shared(self, tensor: Tensor, source: int = 0) -> Tensor:
        if self._several:
            with lost_connection("another rank"):
                dist.broadcast(tensor, source)
        return tensor

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        if not self._several:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self._size)]
        with lost_connection("another rank"):
            dist.all_gather(found, tensor)
        return found


def _traced(model: nn.Module, forward: Forward, devices: int) -> TracedModel:
    """Trace the model with parts as small as `torch.fx` allows."""
    total = sum(parameter.numel() for parameter in model.parameters())
    try:
        return TracedModel(model, forward, find_units(model, total // (4 * devices)))
    except UnsupportedError:
        return TracedModel(model, forward, find_units(model, total))


def _check_alike(expected: Any, traced: Any) -> None:
    pairs = list(zip(tensors_of(expected), tensors_of(traced), strict=False))
    if not pairs or not all(torch.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True) for pair in pairs):
        raise UnsupportedError(
            "the traced model computes something else than the model, which changes a tensor in place or decides by "
            "values between modules. Put this into a module, and name that in stages"
        )


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers after the body."""
    buffers, random = [(buffer, buffer.clone()) for buffer in model.buffers()], torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Split a batch into micro-batches: all tensors with as many samples as the first one.

    The first parts have one sample more where the batch does not divide; a batch of fewer samples has fewer parts.

    Returns:
        Micro-batches, and the share of each in the samples.

    Raises:
        UnsupportedError: if the batch has no tensor with samples.

    >>> [part for part, share in split({"x": torch.arange(5)}, 2)]
    [{'x': tensor([0, 1, 2])}, {'x': tensor([3, 4])}]
    """
    sizes = [leaf.shape[0] for leaf in tensors_of(batch) if leaf.ndim]
    if not sizes or not sizes[0]:
        raise UnsupportedError("the batch has no tensor with samples along its first dimension, and cannot be split")
    size, found, start = int(sizes[0]), [], 0
    for number in range(min(parts, size)):
        end = start + size // parts + (number < size % parts)
        rows = slice(start, end)
        part = pytree.tree_map(lambda leaf, rows=rows: _rows(leaf, size, rows), batch)
        found.append((part, (end - start) / size))
        start = end
    return found


def _rows(leaf: Any, size: int, rows: slice) -> Any:
    return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size else leaf
