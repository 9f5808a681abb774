"""The state of training: copies, random state, digests, and packing for another process."""
