"""Goodput: batch size and learning rate follow the noise of the gradients and the measured throughput."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="goodput",
    label="AdaptiveBatchSize",
    option="goodput/adaptive",
    manual="it sets the learning rate of each step, and with manual optimization nothing tells which steps belong "
    "together",
    own_batches="it counts the samples of each batch before its step",
    apart_from={
        "selecting": "selected samples bias the gradient noise scale",
        "partial": "the gradient noise scale needs the gradients of all ranks for every layer",
        "tuning": "both set the batch size and the learning rate",
    },
)
