"""Branch tuning: tries settings from one state of training within one fit, and continues from the best branch."""
