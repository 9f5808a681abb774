"""Rows of tensors on disk, with the fields of their samples: checked at every read, shared by several runs."""
