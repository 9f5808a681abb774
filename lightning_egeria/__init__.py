"""Knowledge-guided layer freezing for PyTorch Lightning. The public names are in ``__init__.pyi``, beside this file."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text()
# Modules by the public names in them.
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import \w+ as (\w+)$", _STUB, re.MULTILINE)}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Imported on first use: the reference process needs neither Lightning nor torchmetrics, which take longer to import
    # than torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if "lightning.pytorch.cli" in sys.modules:  # LightningCLI finds only imported classes by their short names
    for _name in __all__:
        __getattr__(_name)
