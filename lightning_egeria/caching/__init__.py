"""The outputs of the frozen prefix, kept on disk: see the README.md beside this file."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="cache",
    label="the cache",
    option="cache/disk",
    around=("goodput",),
    strategy_reasons={  # which turns it off, instead of a refusal
        "ModelParallelStrategy": "FSDP2 gathers the weights of a layer on all ranks together, and a rank that has the "
        "layer's outputs would not take part"
    },
)
