"""Graph pipelines: stages that form a graph, so that the branches of a network run at once."""

from lightning_egeria.core.training.methods import Method

METHOD = Method(
    name="pipelining",
    label="a graph pipeline",
    strategies=(),
    manual="for a training loop of your own there is GraphPipeline",
    own_batches="it splits batches",
    apart_from={"*": "a graph pipeline runs without other methods"},
)
