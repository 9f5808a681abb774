"""Freezing the converged front of a network; see README.md beside this file for the method card."""
