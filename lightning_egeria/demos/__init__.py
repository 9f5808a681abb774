"""Models and data of the tutorials and benchmarks."""
