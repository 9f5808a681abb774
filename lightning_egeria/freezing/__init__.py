"""Knowledge-guided freezing of the converged front of a network. README.md in this folder is the method card."""

import dataclasses

from lightning_egeria.core.training.methods import FREEZING

METHOD = dataclasses.replace(FREEZING, option="callbacks/freezing")
