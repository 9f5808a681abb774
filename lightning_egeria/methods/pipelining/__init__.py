"""Graph pipelines: stages that form a graph, so that the branches of a network run at once."""
