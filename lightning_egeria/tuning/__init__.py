"""Branch tuning: settings are tried from one state of training within one fit, and the best branch goes on."""
