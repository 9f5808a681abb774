"""Seeing gradients before DDP averages them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.goodput.gradients import GradientMeter


def measure_exchange(model: Any, meter: GradientMeter) -> None:
    """Let a meter see each bucket of gradients before DDP averages it. Does nothing without DDP.

    The exchange is that of DDP without a hook, bit for bit. `rebuild_reducer` keeps the hook.

    Args:
        model: the strategy's model.
        meter: measures the gradients.

    Raises:
        UnsupportedError: if DDP has a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model._comm_hooks or model._get_ddp_logging_data().get("comm_hook"):
        raise UnsupportedError(
            "the gradient noise scale is measured in DDP's communication hook, and the strategy has another "
            "hook. Remove ddp_comm_hook from DDPStrategy"
        )
    model.register_comm_hook(meter, _average)


# Without annotations: DDP looks at them, and does not know those that are texts.
def _average(meter, bucket):  # type: ignore[no-untyped-def]
    meter.exchanged_bucket(bucket.parameters(), bucket.gradients())
    gradients = bucket.buffer()
    gradients.mul_(1.0 / dist.get_world_size())  # as DDP does, before it adds
    sent: Any = dist.all_reduce(gradients, async_op=True)
    return sent.get_future().then(lambda done: done.value()[0])
