"""Structured partial backprop: steps that compute the gradients of the last layer modules only."""
