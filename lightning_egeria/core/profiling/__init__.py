"""The cost of a training step."""
