"""A graph pipeline as a strategy of Lightning."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.errors import ArgumentError, check_integers
from lightning_egeria.methods.pipelining import METHOD
from lightning_egeria.methods.pipelining.messages import Processes
from lightning_egeria.methods.pipelining.pipeline import GraphPipeline
from lightning_egeria.methods.pipelining.planner import Limits
from lightning_egeria.methods.pipelining.strategy_support import check_support
from lightning_egeria.methods.pipelining.training_log import log_everywhere
from lightning_egeria.methods.pipelining.training_step import TrainingStep


class GraphPipelineStrategy(DDPStrategy):
    """Trains a LightningModule in stages that form a graph, one process for each stage.

    The first training batch creates the pipeline. From then on, a process holds only the weights, gradients and
    optimizer state of its stage. `training_step` runs once for each micro-batch, in the process of the last stage. In
    all processes, numbers that it logs are averaged, and metrics see the whole batch. Validation, tests and predictions
    run with all weights, on the same batches in each process. Checkpoints are those of the plain model.

    Args:
        devices: number of processes; None takes it from ``Trainer(devices=...)``.
        micro_batches: number of parts of a batch.
        stages: module paths of each stage, by its name; None plans the stages, again after each freeze.
        limits: memory, width and group of planned stages; replaces ``devices`` and ``micro_batches``.
        recompute: keep only the inputs of a stage, and repeat its forward pass before its backward pass.
        timeout: limit for exchanges between processes.

    Attributes:
        pipeline: the pipeline; None before the first training batch.

    Raises:
        ArgumentError: if an argument is wrong.
        UnsupportedError: at setup or at the first batch, if the model or the Trainer does something that a pipeline
            does not support; the message names it.
    """

    egeria_method = METHOD

    def __init__(
        self,
        devices: int | None = None,
        micro_batches: int = 8,
        stages: Mapping[str, Sequence[str]] | None = None,
        limits: Limits | None = None,
        recompute: bool = False,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        devices = limits.devices if limits is not None else devices
        check_integers(1, micro_batches=micro_batches, devices=1 if devices is None else devices)
        given: object = stages
        if not (
            given is None or (isinstance(given, Mapping) and all(isinstance(p, list | tuple) for p in given.values()))
        ):
            raise ArgumentError(
                f"stages must name lists of module paths, such as {{'image': ['image']}}, got {given!r:.80}"
            )
        places = [torch.device("cpu")] * devices if devices is not None else None
        super().__init__(parallel_devices=places, timeout=timeout)
        self._micro_batches, self._stages, self._limits, self._recompute = micro_batches, stages, limits, recompute
        self._step: TrainingStep | None = None
        self._synced: list[Metric] = []
        self._failed = False
        self.pipeline: GraphPipeline | None = None

    def setup_distributed(self) -> None:
        """Connect the processes, and give all of them the random state of one process."""
        random = RandomState.current()
        super().setup_distributed()  # which seeds again
        random.restore()
        self._share_random_state()

    def _share_random_state(self) -> None:
        RandomState.from_plain(Processes().share(RandomState.current().to_plain())).restore()

    def setup(self, trainer: pl.Trainer) -> None:
        """Check the set-up and leave the model as it is."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_support(trainer, self.lightning_module)
        self.pipeline, self._failed = None, False
        # All processes get the same batches: those that the user's loader yields in one process.
        trainer._accelerator_connector.use_distributed_sampler = False
        self._share_random_state()
        for metric in self.lightning_module.modules():  # each process sees all samples
            if isinstance(metric, Metric) and metric.sync_on_compute:
                metric.sync_on_compute = False
                self._synced.append(metric)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_support(trainer, self.lightning_module, self.optimizers)
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]  # over all stages
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers alike in all processes, where Lightning seeds them."""
        if (
            isinstance(dataloader, DataLoader)
            and dataloader.worker_init_fn is None
            and int(os.environ.get("PL_SEED_WORKERS", "0"))
        ):
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
        return dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss and the gradients of a batch; `backward` adds the gradients to the parameters."""
        batch, *others = args
        assert self.lightning_module is not None
        if self.pipeline is None:
            with self.precision_plugin.train_step_context():
                self.pipeline, self._step = self._created(batch, others)
        assert self._step is not None
        step, pipeline = self._step, self.pipeline
        step.arguments, step.logged, step.calls = (*others, *kwargs.values()), [], []
        if self._stages is None and pipeline.is_outdated:
            pipeline.replan(self.optimizers)
        parameters = list(self.lightning_module.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            # It seeds dropout, also in a run that resumes from a checkpoint.
            pipeline.steps = self.lightning_module.trainer.fit_loop.total_batch_idx
            with self.precision_plugin.train_step_context():
                loss = pipeline.step(batch, step.loss)
                log_everywhere(self.lightning_module, step.metrics, step.logged, step.calls)
            gradients = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        loss = loss.to(torch.get_default_dtype())
        anchor = torch.ones((), requires_grad=True)
        return _Gradients.apply(anchor, loss, list(zip(parameters, gradients, strict=True)))  # type: ignore[no-any-return]

    def _created(self, batch: Any, others: Sequence[Any]) -> tuple[GraphPipeline, TrainingStep]:
        module = self.lightning_module
        assert module is not None
        step = TrainingStep(module, others)
        pipeline = GraphPipeline(
            module,
            batch,
            micro_batches=self._micro_batches,
            stages=self._stages,
            forward=step,
            limits=self._limits,
            recompute=self._recompute,
        )
        pipeline.keep_own_state(self.optimizers)
        return pipeline, step

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self.pipeline is not None:
            self.pipeline.clip_gradient_norm(float(clip_val))

    def on_validation_start(self) -> None:
        """Bring all weights to all processes."""
        if self.pipeline is not None:
            self.pipeline.gather()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the plain model, on all ranks."""
        if self.pipeline is not None:
            self.pipeline.gather()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the plain model, on all ranks."""
        if self.pipeline is not None:  # such as after a search for a learning rate
            self.pipeline.gather()
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state that optimizers of the plain model have; each process keeps the part of its stage."""
        super().load_optimizer_state_dict(checkpoint)
        if self.pipeline is not None:
            self.pipeline.keep_own_state(self.optimizers)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state that the optimizer of the plain model has, on rank 0."""
        own = getattr(optimizer, "optimizer", optimizer)
        return self.pipeline.optimizer_state(own) if self.pipeline is not None else super().optimizer_state(own)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value as it is: all processes saw the same samples."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the same decision in all processes."""
        votes = [bool(vote) for vote in Processes().gather(torch.tensor(decision))]
        return sum(votes) == len(votes) if all else any(votes)

    def on_exception(self, exception: BaseException) -> None:
        """Wait for no other process from now on."""
        self._failed = True

    def teardown(self) -> None:
        """Leave a model with all its weights, unless training failed."""
        module = self.lightning_module
        stopped = module is not None and module.trainer.interrupted
        if self.pipeline is not None and not self._failed and not stopped:
            self.pipeline.gather()
        for metric in self._synced:
            metric.sync_on_compute = True
        self._synced.clear()
        super().teardown()


class _Gradients(torch.autograd.Function):
    """A loss whose backward adds gradients that were computed before, scaled as the loss is."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: list[tuple[nn.Parameter, Tensor | None]]) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scale = float(outputs[0])
        for parameter, gradient in ctx.gradients:
            if gradient is not None:
                scaled = gradient if scale == 1 else gradient * scale
                parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        ctx.gradients = []
        return None, None, None
