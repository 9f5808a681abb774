"""A graph pipeline over the processes of a job."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.batches.tree import tensor_leaves
from lightning_egeria.core.snapshots.digests import bytes_of
from lightning_egeria.errors import ArgumentError, PipelineError, PlanError, UnsupportedError
from lightning_egeria.methods.pipelining.executor import StageExecutor, form_of
from lightning_egeria.methods.pipelining.messages import Processes
from lightning_egeria.methods.pipelining.plan import Plan, plan_of_named
from lightning_egeria.methods.pipelining.planner import Limits, plan_graph
from lightning_egeria.methods.pipelining.preparation import prepared
from lightning_egeria.methods.pipelining.splitting import split
from lightning_egeria.methods.pipelining.stage_step import Loss, StepResult
from lightning_egeria.methods.pipelining.stages import Placement, rank_stages
from lightning_egeria.methods.pipelining.timeline import Span
from lightning_egeria.methods.pipelining.tracing import Forward
from lightning_egeria.methods.pipelining.units import check_stages
from lightning_egeria.methods.pipelining.weights import StageWeights

_MESSAGE = 600  # characters of a failed rank's message


class GraphPipeline:
    """Computes the gradients of a model in stages that form a graph, one process for each device.

    Every process creates a pipeline with the same model, and calls `step` with the same batches. All processes take the
    weights of rank 0. From the first step on, a process holds only the weights and gradients of its stage. The
    optimizer has all parameters, and skips those of other stages. `gather` brings all weights to all processes.

    Args:
        model: the model, on the CPU.
        example_batch: a batch; its first micro-batch is run to trace, check and time the model.
        devices: number of processes; None takes all of them. Any other number is refused.
        micro_batches: number of parts of a batch.
        stages: module paths of each stage, by its name; None plans the stages.
        forward: called with the model and a micro-batch; returns the output. None calls ``model(micro_batch)``.
        limits: memory, width and group of planned stages; replaces ``devices`` and ``micro_batches``.
        plan: a plan over the same modules, such as an earlier one from JSON; None makes a plan.
        recompute: keep only the inputs of a stage, and repeat its forward pass before its backward pass.

    Attributes:
        plan: the plan.
        spans: this process's computations in the last step, by its own clock.
        steps: number of the last step; it seeds random numbers such as those of dropout.

    Raises:
        ArgumentError: if an argument is wrong.
        PlanError: if stages wait for each other in a circle, or no plan fits into memory.
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
        recompute: bool = False,
    ) -> None:
        self._processes = Processes()
        self._check_setup(model, devices)
        self._limits = limits or Limits(self._processes.size, micro_batches)
        if self._limits.devices != self._processes.size:
            raise ArgumentError(f"limits.devices must be the number of processes, {self._processes.size}, got {limits}")
        self.model, self.spans, self.steps = model, list[Span](), 0
        self._recompute, self._is_planned = recompute, stages is None and plan is None
        self._check_same_model()
        for tensor in (*model.parameters(), *model.buffers()):
            self._processes.broadcast(tensor.data)
        self._seed = int(self._processes.broadcast(torch.tensor(torch.initial_seed() % 2**62)))
        example = split(example_batch, self._limits.micro_batches)[0][0]
        if stages is not None:
            check_stages(model, stages)
        call = forward or (lambda model, batch: model(batch))
        self._prepared = prepared(model, call, example, stages, self._processes.size)
        if self._prepared.has_statistics:  # which the devices of a stage would not share
            self._limits = dataclasses.replace(self._limits, max_width=1)
        self._use(self._plan_of_rank_0(self._first_plan(stages, plan)))

    def _first_plan(self, stages: Mapping[str, Sequence[str]] | None, plan: Plan | None) -> Plan:
        graph, size = self._prepared.graph(self._recompute), self._processes.size
        if stages is not None and plan is None:
            named = plan_of_named(graph, self._prepared.groups, stages, self._limits.micro_batches, self._limits.group)
            if named.devices != size:
                raise PlanError(
                    f"the plan has stages for {named.devices} processes, and there are {size}. Start as many, or name "
                    "as many stages"
                )
            return named
        if plan is None:
            return plan_graph(graph, self._limits)
        if [node.name for node in plan.graph.nodes] != [node.name for node in graph.nodes]:
            raise PlanError(f"the plan is for other modules, expected {[node.name for node in graph.nodes]}")
        if plan.devices > size:
            raise PlanError(f"the plan has stages for {plan.devices} processes, and there are {size}. Start as many")
        if self._prepared.has_statistics and any(stage.width > 1 for stage in plan.stages):
            raise UnsupportedError(
                "a stage has several devices and the model has batch statistics, which they would not share. Pass "
                "limits with max_width=1"
            )
        return dataclasses.replace(plan, graph=graph)

    def _check_setup(self, model: nn.Module, devices: int | None) -> None:
        if devices is not None and devices != self._processes.size:
            raise ArgumentError(f"devices must be the number of processes, {self._processes.size}, got {devices}")
        # Without a back end, init_process_group takes one for each kind of device.
        if self._processes.several and "cpu:gloo" not in (backends := str(dist.get_backend_config())).split(","):
            raise UnsupportedError(f"graph pipelines run with the back end gloo, got {backends}")
        if any(tensor.device.type != "cpu" for tensor in (*model.parameters(), *model.buffers())):
            raise UnsupportedError("graph pipelines run on the CPU in this version. Leave the model there")

    def _check_same_model(self) -> None:
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        text = " ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors)
        texts = self._processes.each(str(xxhash.xxh3_64_hexdigest(text.encode())))
        other = [rank for rank, found in enumerate(texts) if found != texts[0]]
        if other:
            raise PipelineError(f"rank {other[0]} has another model than rank 0. Create the same one on all ranks")

    def _plan_of_rank_0(self, plan: Plan) -> Plan:
        return Plan.from_json(self._processes.share(plan.to_json()))

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        if plan.devices < self._processes.size and self._processes.rank == 0:
            warnings.warn(
                f"the fastest plan needs {plan.devices} of {self._processes.size} processes; the others compute "
                "nothing. Start fewer, pass more micro_batches, or name the stages",
                stacklevel=2,
            )
        self._modes_now, self._parameters = self._modes(), list(map(id, self.model.parameters()))
        home = {node: number for number, stage in enumerate(plan.stages) for node in stage.nodes}
        stage_of = {unit: home[node] for node, group in enumerate(self._prepared.groups) for unit in group}
        traced = self._prepared.traced
        last = traced.reads(traced.output)[-1]
        placement = Placement(traced, plan, stage_of, stage_of[traced.unit_of[last]])
        ranks = rank_stages(placement, self._seed, self._recompute)
        # None where the plan needs fewer processes than there are: it exchanges what all exchange, and holds nothing.
        own = ranks[self._processes.rank] if self._processes.rank < plan.devices else None
        self._executor = StageExecutor(own) if own is not None else None
        self._known: set[Any] = set()
        holders = {
            name: tuple(work.rank for work in ranks if id(parameter) in work.parameters)
            for name, parameter in self.model.named_parameters()
        }
        for name, _ in self.model.named_buffers():
            stages = [stage for unit, stage in stage_of.items() if name.startswith(f"{unit}.")]
            holders[name] = tuple(plan.ranks(stages[0])) if stages else ()
        modules = dict(self.model.named_modules())
        foreign = [modules[unit] for unit, stage in stage_of.items() if own is None or stage != own.stage]
        self._weights = StageWeights(self.model, self._processes, holders, foreign)

    def step(self, batch: Any, loss_fn: Loss) -> Tensor:
        """Compute the loss and the gradients of a batch.

        Gradients are added to those that are there, as `Tensor.backward` does. A frozen parameter is noticed here: its
        stage stops its backward, and stages stay where they are until `replan`.

        Args:
            batch: tensors, arrays and lists with one row a sample, in any tree; the same on all ranks.
            loss_fn: called with the output and the micro-batch; returns the mean loss of its samples.

        Returns:
            The loss of the batch, on all ranks.

        Raises:
            PipelineError: if a rank failed, on all ranks with the same message, or if it got another batch. Gradients
                are then as before.
            UnsupportedError: if no parameter trains, or the code between modules changed.
        """
        if self._parameters != list(map(id, self.model.parameters())):
            raise UnsupportedError(
                "the model has other parameters than when the pipeline was created, such as after "
                "load_state_dict(assign=True). Create the pipeline again"
            )
        parts = split(batch, self.plan.micro_batches)
        self._check_same(batch)
        if self._modes() != self._modes_now:
            self._follow_modes()
        if not any(self.plan.learns):
            raise UnsupportedError("no parameter of the model trains. Unfreeze some of them")
        self._weights.release()
        self.steps += 1
        for part, _ in parts:
            if (form := form_of(part)) not in self._known:
                self._agree(self._executor.learn_forms(part) if self._executor is not None else None, 0.0)
                self._known.add(form)
        before = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in before:
            parameter.grad = None
        try:
            executor = self._executor
            result = executor.step(parts, loss_fn, self.steps) if executor is not None else StepResult()
            loss = self._agree(result.failure, result.loss)
            self._weights.sum_shared_gradients()
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        self.spans = result.spans
        for parameter, gradient in before:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        return torch.tensor(loss, dtype=torch.float64)

    def gather(self) -> None:
        """Bring parameters and buffers of all stages to all processes, such as before validation or a checkpoint.

        Every process must call it. `model.state_dict()` is then that of the plain model; until then, it raises
        `PipelineError`. The next `step` frees what belongs to other stages.
        """
        self._weights.gather()

    @property
    def is_outdated(self) -> bool:
        """Whether other parameters train than when the stages were planned."""
        learns = self._prepared.graph(self._recompute).nodes
        pairs = zip(self.plan.graph.nodes, learns, strict=True)
        return any((old.backward_s > 0) != (new.backward_s > 0) for old, new in pairs)

    def replan(self, optimizers: Iterable[Optimizer] = ()) -> Plan:
        """Plan again for what trains now, such as after a freeze, and move weights and optimizer state.

        Every process must call it between steps. Stages that were named, or came with a plan, stay.

        Args:
            optimizers: those of this process.

        Returns:
            The plan.

        Raises:
            PlanError: if nothing fits into memory.
        """
        graph = self._prepared.graph(self._recompute)
        plan = plan_graph(graph, self._limits) if self._is_planned else dataclasses.replace(self.plan, graph=graph)
        plan = self._plan_of_rank_0(plan)
        self.gather()
        before = self._weights
        self._use(plan)
        self._weights.move_state(optimizers, before)
        return plan

    def clip_gradient_norm(self, most: float) -> float:
        """Scale the gradients of all stages so that their 2-norm is at most ``most``; return the norm before.

        Every process must call it.
        """
        norm = self._weights.gradient_norm()
        factor = most / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if factor < 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer over all parameters, on rank 0; elsewhere that of this stage.

        Every process must call it. It is the state that the optimizer of the plain model has.
        """
        return self._weights.gather_optimizer_state(optimizer)

    def keep_own_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Drop the state that optimizers loaded for parameters of other stages."""
        self._weights.keep_own_state(optimizers)

    def _modes(self) -> str:
        learns = (str(int(parameter.requires_grad)) for parameter in self.model.parameters())
        return "".join(learns) + "".join(str(int(module.training)) for module in self.model.modules())

    def _follow_modes(self) -> None:
        """Keep the stages, with backwards for those that learn now, and expect random numbers everywhere."""
        self._prepared.traced.expect_random_anywhere()
        whole, before = self._weights.are_whole, self._weights
        self._use(self._plan_of_rank_0(dataclasses.replace(self.plan, graph=self._prepared.graph(self._recompute))))
        if not whole:
            self._weights.take_over(before)

    def _check_same(self, batch: Any) -> None:
        digest = xxhash.xxh3_64(f"{form_of(batch)} {self._modes()} {self._prepared.traced.refresh()}".encode())
        for leaf in tensor_leaves(batch):
            digest.update(bytes_of(leaf))
        own = torch.tensor(digest.intdigest() >> 1)
        if len({int(one) for one in self._processes.gather(own)}) > 1:
            raise PipelineError(
                "the ranks got different batches, froze different parameters, or compute different numbers between "
                "modules. Give each rank the whole batch: no DistributedSampler, and the same seed for shuffling"
            )

    def _agree(self, failure: Exception | None, loss: float) -> float:
        """Return the sum of the losses of all ranks; raise the same error on all if one failed."""
        found = self._processes.gather(torch.tensor([failure is not None, loss], dtype=torch.float64))
        failed = [rank for rank, (flag, _) in enumerate(found) if flag]
        if failed:
            rank = failed[0]
            told = self._processes.share(f"{type(failure).__name__}: {failure}"[:_MESSAGE], rank)
            stage = self.plan.stages[self.plan.place(rank)[0]].name
            raise PipelineError(f"rank {rank}, stage {stage!r}, failed: {told}") from failure
        return float(sum(value for _, value in found))
