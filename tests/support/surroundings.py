"""What training does not own: the state of the process, and the user's classes, functions and modules.

`watched` compares all of it before and after a ``fit``. Each exception stands in `LIGHTNING_CHANGES`, with its reason.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

# Changed by Lightning itself, with or without this package.
LIGHTNING_CHANGES = {
    ("environment", "CUBLAS_WORKSPACE_CONFIG"): "deterministic=True sets it",
    ("environment", "GRPC_VERBOSITY"): "its TPU check sets it",
    ("environment", "LOCAL_RANK"): "a strategy with several processes sets it",
    ("environment", "MASTER_ADDR"): "likewise",
    ("environment", "MASTER_PORT"): "likewise",
    ("environment", "NODE_RANK"): "likewise",
    ("environment", "WORLD_SIZE"): "likewise",
    ("environment", "RANK"): "likewise",
    ("environment", "PL_GLOBAL_SEED"): "seed_everything sets it",
    ("environment", "PL_SEED_WORKERS"): "likewise",
    ("environment", "OMP_NUM_THREADS"): "a strategy with several processes sets it",
    ("environment", "KMP_INIT_AT_FORK"): "torch's compiler sets it",
    ("environment", "KMP_DUPLICATE_LIB_OK"): "likewise",
    ("environment", "TORCHINDUCTOR_CACHE_DIR"): "likewise",
    ("environment", "TRITON_CACHE_DIR"): "likewise",
    ("process", "excepthook"): "torch's process groups set it",
    ("torch", "deterministic algorithms"): "deterministic=True sets it",
    ("torch", "deterministic fill"): "likewise",
    (
        "class torch.utils.data.dataloader.DataLoader",
        "__init__",
    ): "it patches loader hooks, and after an error leaves that",
    ("class torch.utils.data.dataloader.DataLoader", "__setattr__"): "likewise",
    ("class torch.utils.data.dataloader.DataLoader", "__delattr__"): "likewise",
    ("class torch.nn.modules.module.Module", "__init__"): "torch's compiler patches it",
    ("class torch.nn.modules.module.Module", "__setstate__"): "likewise",
    ("process", "start method"): "the first process that anybody starts fixes it",
}
# Lightning sets both for a strategy with several processes.
_THREADS, _OMP = ("torch", "threads"), ("environment", "OMP_NUM_THREADS")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks") and isinstance(vars(nn.Module())[name], dict)]


def of_process() -> dict[tuple[str, str], Any]:
    """The state of this process that code outside of training may rely on."""
    found: dict[tuple[str, str], Any] = {("environment", name): value for name, value in os.environ.items()}
    found |= {
        ("global hook", name): dict(value)
        for name, value in vars(torch_module).items()
        if "_hooks" in name and isinstance(value, dict)
    }
    found |= {("collate function of", repr(kind)): value for kind, value in default_collate_fn_map.items()}
    found |= {("signal", name.name): signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for name in ("", "lightning", "lightning.pytorch", "torch", "py.warnings"):
        logger = logging.getLogger(name)
        found["logger", name] = logger.level, logger.propagate, logger.disabled, [*logger.handlers], [*logger.filters]
    return found | {
        ("torch", "threads"): torch.get_num_threads(),
        ("torch", "dtype"): torch.get_default_dtype(),
        ("torch", "gradients"): torch.is_grad_enabled(),
        ("torch", "inference mode"): torch.is_inference_mode_enabled(),
        ("torch", "anomaly detection"): torch.is_anomaly_enabled(),
        ("torch", "autocast"): (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        ("torch", "deterministic algorithms"): torch.are_deterministic_algorithms_enabled(),
        ("torch", "deterministic fill"): torch.utils.deterministic.fill_uninitialized_memory,
        ("torch", "fast attention"): torch.backends.mha.get_fastpath_enabled(),
        ("torch", "precision of products"): torch.get_float32_matmul_precision(),
        ("torch", "multiprocessing strategy"): torch.multiprocessing.get_sharing_strategy(),
        ("process", "warning filters"): [*warnings.filters],
        ("process", "showwarning"): warnings.showwarning,
        ("process", "excepthook"): sys.excepthook,
        ("process", "excepthook of threads"): threading.excepthook,
        ("process", "stdout"): sys.stdout,
        ("process", "stderr"): sys.stderr,
        ("process", "path"): [*sys.path],
        ("process", "meta path"): [*sys.meta_path],
        ("process", "working folder"): str(os.getcwd()),  # noqa: PTH109  # as a program asks
        ("process", "garbage collection"): (gc.isenabled(), gc.get_threshold()),
        ("process", "recursion limit"): sys.getrecursionlimit(),
        ("process", "start method"): multiprocessing.get_start_method(allow_none=True),
        ("process", "trace"): (sys.gettrace(), sys.getprofile()),
    }


def classes_of(*objects: Any) -> set[type]:
    """Return the classes of objects and of their submodules, with their bases."""
    kinds = {type(part) for one in objects for part in (one.modules() if isinstance(one, nn.Module) else [one])}
    return {base for one in kinds for base in one.__mro__}


def of_code(classes: set[type]) -> dict[tuple[str, str], Any]:
    """Functions and the like that classes hold, and the globals of the script."""
    found: dict[tuple[str, str], Any] = {}
    for kind in classes:
        for name, value in vars(kind).items():
            if callable(value) or hasattr(value, "__get__"):  # others are the user's values
                found[f"class {kind.__module__}.{kind.__qualname__}", name] = value
    for name, value in vars(sys.modules["__main__"]).items():
        if isinstance(value, type | types.FunctionType | types.ModuleType):
            found["script", name] = value
    return found


def of_module(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What a network has beside its weights: classes, forwards, hooks, members; not what a step of training leaves."""
    found: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        found[f"module {path!r}", "class"] = type(part)
        found[f"module {path!r}", "members"] = [*part._modules, *part._parameters, *part._buffers]
        for name, value in vars(part).items():
            if isinstance(value, types.FunctionType | types.MethodType) or name in ("forward", "train", "eval"):
                found[f"module {path!r}", name] = value
        for name in _HOOKS:
            found[f"module {path!r}", name] = dict(vars(part)[name])
        for name, parameter in part.named_parameters(recurse=False):
            found[f"parameter {path}.{name}", "hooks"] = dict(parameter._backward_hooks or {})
            found[f"parameter {path}.{name}", "trains"] = parameter.requires_grad
    return found


def of_loader(loader: DataLoader) -> dict[tuple[str, str], Any]:
    """What a loader of the user holds: a frozen prefix is served by a loader of ours."""
    names = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "generator", "num_workers")
    found: dict[tuple[str, str], Any] = {("loader", name): getattr(loader, name) for name in names}
    return found | {("loader", "class"): type(loader), ("loader", "attributes"): sorted(vars(loader))}


def differences(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> list[str]:
    """What changed, one line each; `LIGHTNING_CHANGES` left out."""
    missing = object()
    changed = [
        key for key in before.keys() | after.keys() if not _same(before.get(key, missing), after.get(key, missing))
    ]
    return sorted(
        f"{key[0]}, {key[1]}: {before.get(key, 'nothing')!r:.200} -> {after.get(key, 'nothing')!r:.200}"
        for key in changed
        if key not in LIGHTNING_CHANGES and not (key == _THREADS and _OMP in changed)
    )


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, types.MethodType) and isinstance(second, types.MethodType):
        return first == second
    if isinstance(first, list | tuple | dict) and type(first) is type(second):
        items = (first.items(), second.items()) if isinstance(first, dict) else (first, second)
        return len(first) == len(second) and all(map(_same, *items))
    return isinstance(first, str | int | float | torch.dtype) and type(first) is type(second) and first == second


@contextlib.contextmanager
def watched(module: Any = None, loader: Any = None, objects: Sequence[Any] = ()) -> Iterator[None]:
    """Fail if the body, a ``fit``, changes what it does not own; also where it raises.

    Args:
        module: a network, whose hooks, methods and flags must stay too.
        loader: a loader of the user.
        objects: more objects, whose classes must stay.

    Raises:
        AssertionError: something is another object, or has another value.
    """

    classes = classes_of(*(one for one in (module, loader, *objects) if one is not None))

    def state() -> dict[tuple[str, str], Any]:
        found = of_process() | of_code(classes)
        found |= of_module(module) if isinstance(module, nn.Module) else {}
        return found | (of_loader(loader) if type(loader) is DataLoader else {})

    before = state()
    try:
        yield
    finally:
        left = differences(before, state())
        assert not left, "fit changed what it does not own:\n" + "\n".join(left)
