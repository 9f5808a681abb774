"""Packing objects: their structure as bytes, their tensors as tensors.

Tensors stay out of the pickle. Taking a snapshot of a model is therefore one copy of its weights, and sending it does
not hold the interpreter's lock.

Code travels in two ways. For another process, classes and functions of a script or notebook are packed by value,
together with the globals that they use. In this process they are packed by reference: unpacking a class by value where
that class exists replaces its methods by copies that have globals of their own. `unpack` refuses to do so.

Pickle and cloudpickle alone were not taken: they copy each tensor into the stream, fail on attributes that cannot be
sent, and know nothing of weights that FSDP2 divides. `copy.deepcopy` copies no function, so a function that stands in
for a module's forward and holds that module would still use the original.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset

from lightning_egeria.core.network.sharding import is_distributed, is_sharded, undivided
from lightning_egeria.errors import WorkerError

ALIGNMENT = 64  # bytes
BLOCK_BYTES = 2**26
_CONSTANTS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


@dataclasses.dataclass
class PackedObject:
    """An object, split into its structure and its tensors.

    Attributes:
        structure: the pickled object, with a number in place of each tensor.
        tensors: the tensors by number, each once, even if the object holds it several times.
        code: classes, functions and Python modules by number; None if the structure holds code by value.
        received: whether it came from another process, so that code by value may be unpacked.
    """

    structure: bytes | bytearray
    tensors: list[Tensor]
    code: list[object] | None = None
    received: bool = False
    _copied: list[torch.cuda.Event] = dataclasses.field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Size of structure and tensors in bytes."""
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors)

    def to_host(self) -> PackedObject:
        """Return a copy with contiguous tensors in host memory; read them only after `wait`.

        From a GPU, a separate stream copies them into pinned memory. Only the next kernel of the current stream waits
        for it, because it may change them.
        """
        packed = dataclasses.replace(self, tensors=[_cloned(tensor) for tensor in self.tensors], _copied=[])
        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            packed._fetch(device)
        return packed

    def wait(self) -> None:
        """Wait until the tensors are copied."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _fetch(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        places = [index for index, tensor in enumerate(self.tensors) if tensor.device == device]
        hosts = alike_in_few_blocks([self.tensors[index] for index in places], pin_memory=True)
        with torch.cuda.stream(stream):
            for index, host in zip(places, hosts, strict=True):
                tensor = self.tensors[index]
                self.tensors[index] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        # The next optimizer step changes the weights; it must wait for the copy.
        torch.cuda.current_stream(device).wait_event(event)
        self._copied.append(event)


def pack(value: object, for_process: bool) -> PackedObject:
    """Pack ``value`` for another process, or for `unpack` in this one.

    The packed object holds the tensors of ``value`` themselves, not copies. A module's attribute that cannot be pickled
    (a lock, an open file) becomes an `Unsendable`, which raises only when the network uses it. So do data sets and data
    loaders: few networks use them in ``forward``, and they may be larger than the network.

    Args:
        value: the object.
        for_process: whether another process unpacks it. It then holds the classes and functions that a notebook or
            script defines, with the globals that they use; otherwise it refers to all classes, functions and Python
            modules.

    Raises:
        Exception: if anything else cannot be pickled.
    """
    try:
        return _pack(value, for_process, leave_out=False)
    except Exception:  # pickling runs the user's code
        return _pack(value, for_process, leave_out=True)


def unpack(packed: PackedObject) -> Any:
    """Return the object that `pack` packed, with the tensors that the packed object holds now.

    Raises:
        WorkerError: if it was packed in this process for another one. To unpack it here would replace the methods of
            classes that a script or notebook defines.
    """
    if packed.code is None and not packed.received:
        raise WorkerError("this object was packed for another process; in this one, use pack(..., for_process=False)")
    return _Unpacker(io.BytesIO(packed.structure), packed.tensors, packed.code or []).load()


def copied(value: Any, to_host: bool = True) -> Any:
    """Return a copy for this process, with copies of its tensors in host memory, or on their devices.

    It shares classes, functions and Python modules with ``value``. A function that holds values in its closure or
    defaults is copied with them, because they may be parts of the network.

    Raises:
        Exception: if a part cannot be pickled.
    """
    packed = pack(value, for_process=False)
    if to_host:
        packed = packed.to_host()
        packed.wait()
    else:
        packed.tensors = [tensor.detach().clone() for tensor in packed.tensors]
    return unpack(packed)


def alike_in_few_blocks(tensors: Sequence[Tensor], pin_memory: bool = False) -> list[Tensor]:
    """Return contiguous tensors in host memory for the values of others; many in a block, as to pin one takes long.

    Each block has one dtype, or `torch.save` would not take them.

    >>> first, second, third = alike_in_few_blocks([torch.zeros(3), torch.zeros(2, 2), torch.tensor(True)])
    >>> first.shape, second.shape, third.dtype
    (torch.Size([3]), torch.Size([2, 2]), torch.bool)
    >>> first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    True
    """
    sizes: list[int] = []
    last: dict[torch.dtype, int] = {}
    made: list[tuple[int, int]] = []  # block and first byte of each
    for tensor in tensors:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        block = last.get(tensor.dtype)
        if block is None or sizes[block] + size > BLOCK_BYTES:
            block = last[tensor.dtype] = len(sizes)
            sizes.append(0)
        made.append((block, sizes[block]))
        sizes[block] += size
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory).untyped_storage() for size in sizes]
    found = []
    for tensor, (block, start) in zip(tensors, made, strict=True):
        stride = torch.empty(tensor.shape, device="meta").stride()
        host = torch.empty(0, dtype=tensor.dtype)
        found.append(host.set_(memory[block], start // tensor.element_size(), tensor.shape, stride))
    return found


class Unsendable:
    """Stands for an object that was not copied with the network.

    Args:
        message: the error message of each use: which object, and why it was not copied.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        """Raise the error.

        Raises:
            WorkerError: for every name but those that Python itself looks up.
        """
        if name.startswith("__") or name == "_message":
            raise AttributeError(name)
        raise WorkerError(self._message)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error.

        Raises:
            WorkerError: always.
        """
        raise WorkerError(self._message)


def _cloned(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous() if plain.is_cuda else plain.clone(memory_format=torch.contiguous_format)


def _pack(value: object, for_process: bool, leave_out: bool) -> PackedObject:
    file = io.BytesIO()
    packer = (_Sender if for_process else _Copier)(file, leave_out)
    packer.dump(value)
    return PackedObject(file.getvalue(), packer.tensors, None if for_process else packer.code)


class _Sender(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    """Packs for another process: code that it could not import goes by value."""

    for_process = True

    def __init__(self, file: io.BytesIO, leave_out: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._leave_out = leave_out
        self.tensors: list[Tensor] = []
        self.code: list[object] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, str] | None:
        if isinstance(value, Tensor) and is_distributed(value):
            pass  # the caller of `pack` replaces it by the gathered tensor
        elif type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.device.type not in ("cpu", "cuda"):
            return None
        return self._number(value, self.tensors), "parameter" if isinstance(value, nn.Parameter) else "tensor"

    def _number(self, value: Any, known: list[Any]) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(known)
            known.append(value)
        return self._numbers[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
            return _same, (value._torchdynamo_orig_callable,)  # compiled functions cannot be pickled
        if _is_data(value):
            name = type(value).__name__
            text = f"the network holds a {name}, which the reference model does not get because it holds data. "
            return Unsendable, (f"{text}Keep what forward needs of it as an attribute",)
        if isinstance(value, nn.Module):
            if parametrize.is_parametrized(value):
                # Its class was created at run time and cannot be pickled by name; this sends the class itself.
                return copyreg.__newobj__, (type(value),), _on_host(vars(value))  # type: ignore[attr-defined]
            if is_sharded(value):
                kind, state = undivided(value)
                sent = {name: self._sendable(name, part) if self._leave_out else part for name, part in state.items()}
                return _empty, (kind,), _on_host(sent)
            if self._leave_out or isinstance(vars(value).get("_device"), torch.device):
                function, args, state = tuple(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))[:3]
                if self._leave_out:
                    state = {name: self._sendable(name, part) for name, part in dict(state).items()}
                return function, args, _on_host(state)
        return self._reduced(value)

    def _reduced(self, value: Any) -> Any:
        return super().reducer_override(value)

    def _sendable(self, name: str, value: object) -> object:
        if isinstance(value, dict) and name in ("_modules", "_parameters", "_buffers"):
            return value
        try:
            _pack(value, self.for_process, leave_out=False)
        except Exception as error:  # pickling runs the user's code
            other = ", or use background=False" if self.for_process else ""
            return Unsendable(
                f"the attribute {name!r} cannot be copied for the reference model: {type(error).__name__}: {error}. "
                f"Create it in forward{other}"
            )
        return value


class _Copier(_Sender):
    """Packs for this process: all code goes by reference."""

    for_process = False

    def persistent_id(self, value: Any) -> tuple[int, str] | None:
        if isinstance(value, _Reference):
            return self._number(value.code, self.code), "code"
        if isinstance(value, type | types.ModuleType) or (
            isinstance(value, types.FunctionType) and (_has_a_name(value) or _holds_nothing(value))
        ):
            return self._number(value, self.code), "code"
        return super().persistent_id(value)

    def _reduced(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            held = value.__defaults__, value.__kwdefaults__, vars(value)
            return _function, (_Reference(value), value.__closure__), held, None, None, _hold
        if isinstance(value, types.CellType):
            return types.CellType, (), _contents(value), None, None, _fill
        return NotImplemented


@dataclasses.dataclass
class _Reference:
    """Stands in a pickle for a function that is not copied itself, but whose copy is made from it."""

    code: types.FunctionType


def _has_a_name(function: types.FunctionType) -> bool:
    """Whether a module or class holds the function under its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _holds_nothing(function: types.FunctionType) -> bool:
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return function.__closure__ is None and all(type(value) in _CONSTANTS for value in defaults)


def _function(original: types.FunctionType, closure: tuple[types.CellType, ...] | None) -> types.FunctionType:
    copy = types.FunctionType(original.__code__, original.__globals__, original.__name__, None, closure)
    copy.__qualname__, copy.__module__ = original.__qualname__, original.__module__
    return copy


def _hold(function: types.FunctionType, held: tuple[Any, Any, dict[str, Any]]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = held
    vars(function).update(attributes)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _fill(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    for value in contents:
        cell.cell_contents = value


def _is_data(value: object) -> bool:
    if isinstance(value, nn.Module):
        return False
    # `lightning` and `pytorch_lightning` have a class each.
    names = {base.__name__ for base in type(value).__mro__ if base.__module__.split(".")[0].endswith("lightning")}
    return isinstance(value, (Dataset, DataLoader)) or bool(names & {"LightningDataModule", "Trainer"})


def _on_host(state: Any) -> Any:
    """Set the device that Lightning's modules keep as an attribute to the one of the other process."""
    if isinstance(state, dict) and isinstance(state.get("_device"), torch.device):
        return {**state, "_device": torch.device("cpu")}
    return state


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _same(value: object) -> object:
    return value


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], code: list[object]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._code = code
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, found: tuple[int, str]) -> object:
        number, kind = found
        if kind == "code":
            return self._code[number]
        if kind == "tensor":
            return self._tensors[number]
        if number not in self._parameters:
            self._parameters[number] = nn.Parameter(self._tensors[number], requires_grad=False)
        return self._parameters[number]
