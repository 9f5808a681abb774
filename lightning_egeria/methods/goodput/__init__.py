"""Goodput: batch size and learning rate follow the noise of the gradients and the measured throughput."""
