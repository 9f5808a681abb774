"""Selective-Backprop: backward for the samples that teach most."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="selecting",
    label="selective backprop",
    option="selecting/queue",
    around=("goodput", "cache"),
    strategies=("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"),
    own_batches="it selects among the samples of a batch",
    apart_from={"tuning": "trials of settings train on every sample so far"},
)
