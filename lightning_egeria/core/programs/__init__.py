"""Programs that run as jobs: how a file describes them, and how their processes start and end. Imports no torch."""
