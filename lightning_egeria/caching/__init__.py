"""The outputs of the frozen prefix, kept on disk: see the README.md beside this file."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="cache",
    label="the cache",
    option="cache/disk",
    around=("goodput",),
    # Both turn it off.
    own_batches="it plans a batch before the loader loads it",
    strategy_reasons={
        "ModelParallelStrategy": "FSDP2 gathers the weights of a layer on all ranks together, and a rank that has the "
        "layer's outputs would not take part"
    },
)
