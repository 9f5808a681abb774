"""The set-ups that partial backprop runs in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import lightning.pytorch as pl
from torch import nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.distributed.reducer import has_communication_hook, wrapped_by_ddp
from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.support import check_setup
from lightning_egeria.errors import ArgumentError, UnsupportedError
from lightning_egeria.methods.partial import METHOD
from lightning_egeria.methods.partial.arguments import PartialArguments
from lightning_egeria.methods.partial.plans import SuffixPlan
from lightning_egeria.upstream.ddp import settings_of


def check_trainer(trainer: pl.Trainer, arguments: PartialArguments, layer_modules: Sequence[str] | None) -> None:
    """Refuse a Trainer that partial backprop does not support.

    Args:
        trainer: the Trainer, after it has started its processes.
        arguments: of the callback.
        layer_modules: argument of the callback.

    Raises:
        UnsupportedError: with another strategy than one device or DDP, with settings of DDP that contradict, or with
            manual optimization.
        ArgumentError: if depths are given for another number of ranks or follow plasticity that no callback measures,
            or if layer modules are named beside freezing.
    """
    check_setup(trainer, METHOD)
    is_ddp = type(trainer.strategy).__name__ == "DDPStrategy"
    settings = settings_of(trainer.strategy) if is_ddp else {}
    if settings.get("find_unused_parameters") and arguments.exchange != "all":
        raise UnsupportedError(
            "find_unused_parameters=True lets ranks lack gradients that the others wait for. Leave it out, or use "
            "exchange='all'"
        )
    arguments.check_size(trainer.world_size)
    freezing = freezing_of(trainer)
    if arguments.depths == "graded" and (freezing is None or not freezing.measures_plasticity):
        raise ArgumentError(
            "depths='graded' follows plasticity, which KnowledgeGuidedFreezing measures. Add it to the Trainer's "
            "callbacks, or use depths='temporal'"
        )
    if freezing is not None and layer_modules is not None:
        raise ArgumentError(
            f"layer_modules must be given to {type(freezing).__name__} only: partial backprop takes those of freezing"
        )


def check_model(trainer: pl.Trainer, module: nn.Module, plan: SuffixPlan, arguments: PartialArguments) -> None:
    """Refuse a model whose exchange of gradients partial backprop does not know. Call it in training.

    Raises:
        UnsupportedError: if a communication hook would be left out, or synchronized batch normalisation would wait for
            the backward of ranks that have none.
    """
    wrapped = wrapped_by_ddp(trainer.strategy)
    if wrapped is not None and arguments.exchange != "all" and has_communication_hook(wrapped):
        raise UnsupportedError(
            "a communication hook changes how DDP exchanges gradients, and an exchange among contributors would not "
            "call it. Use exchange='all', or remove the hook"
        )
    if plan.differs and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise UnsupportedError(
            "SyncBatchNorm exchanges gradients in its own backward, so a rank with a shorter suffix would leave the "
            "others waiting. Use depths='temporal', or sync_batchnorm=False"
        )


def check_batches(ranks: Ranks, batches: float) -> None:
    """Check that all ranks have as many training batches. Every rank must call it.

    Args:
        ranks: the processes of the job.
        batches: of this rank in an epoch; infinite if not known.

    Raises:
        UnsupportedError: if ranks differ.
    """
    found = [row[0] for row in ranks.each([float(batches)])]
    if len(set(found)) > 1:
        counts = ", ".join(str(int(count)) if math.isfinite(count) else "unknown" for count in found)
        raise UnsupportedError(
            f"ranks 0, 1, ... have {counts} training batches, and each exchange of gradients needs all ranks. Give all "
            "ranks the same number, as DistributedSampler does, or use limit_train_batches"
        )


def exchanged_layers(module: nn.Module, chain: LayerChain, trainer: pl.Trainer) -> list[list[nn.Parameter]]:
    """Return the parameters whose gradients ranks exchange: those of each layer module, and last all others that train.

    Args:
        module: the model.
        chain: its layer chain.
        trainer: the Trainer.
    """
    wrapped = wrapped_by_ddp(trainer.strategy)
    ignored = set(wrapped.parameters_to_ignore) if wrapped is not None else set()
    parameters = {name: p for name, p in module.named_parameters() if name not in ignored}
    layers = [[parameters[name] for name in one.parameters if name in parameters] for one in chain.layer_modules]
    taken = {parameter for layer in layers for parameter in layer}
    return [*layers, [p for p in parameters.values() if p.requires_grad and p not in taken]]
