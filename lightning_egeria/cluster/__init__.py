"""Who gets which devices: cluster policies, and a simulator that compares them. Imports no torch and no Lightning."""
