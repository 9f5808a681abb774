"""Further methods, one folder each."""
