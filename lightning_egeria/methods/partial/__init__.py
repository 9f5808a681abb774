"""Structured partial backprop: steps that compute the gradients of the last layer modules only."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="partial",
    label="partial backprop",
    option="callbacks/partial",
    strategy_reasons={
        "ModelParallelStrategy": "FSDP2 gathers weights and exchanges gradients in the backward of each layer, so a "
        "rank with a shorter suffix would leave the others waiting",
        "FSDPStrategy": "FSDP1 flattens several layers into one parameter, which has a gradient as a whole",
        "DeepSpeedStrategy": "DeepSpeed exchanges gradients in buckets that it fixes at the start",
    },
    manual="it needs one backward for each batch, and manual optimization may have others",
    changes_gradients=True,
)
