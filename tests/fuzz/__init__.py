"""Damaged files for all readers; `campaign` gives them a million."""
