"""`egeria-train`: the Hydra application and its messages."""
