"""Selective-Backprop: backward for the samples that teach most."""
