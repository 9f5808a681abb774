"""Samples and batches: their tensors, ids and loaders."""
