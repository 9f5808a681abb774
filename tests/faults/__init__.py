"""Faults that are put into a training job, and what must follow from each."""
