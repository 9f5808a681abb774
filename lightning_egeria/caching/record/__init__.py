"""Tensors that stand for what was not loaded or computed, and do so when anything needs their values."""
