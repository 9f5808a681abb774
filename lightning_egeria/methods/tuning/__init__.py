"""Branch tuning: tries settings from one state of training within one fit, and continues from the best branch."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="tuning",
    label="branch tuning",
    option="callbacks/tuning",
    strategy_reasons={"ModelParallelStrategy": "FSDP2 divides the state of training, which trials return to"},
    own_batches="it reads batches ahead",
)
