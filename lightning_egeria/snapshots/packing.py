"""Packing objects for another process: their structure as bytes, their tensors as tensors.

Tensors stay out of the pickle. Taking a snapshot of a model is therefore one copy of its weights, and sending it does
not hold the interpreter's lock.

Pickle and cloudpickle alone were not taken: they copy each tensor into the stream, fail on attributes that cannot be
sent, and know nothing of weights that FSDP2 divides.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import types
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset

from lightning_egeria.errors import WorkerError
from lightning_egeria.network.sharding import is_distributed, is_sharded, undivided

ALIGNMENT = 64  # bytes
BLOCK_BYTES = 2**26


@dataclasses.dataclass
class PackedObject:
    """An object, split into its structure and its tensors.

    Attributes:
        structure: the pickled object, with a number in place of each tensor.
        tensors: the tensors by number, each once, even if the object holds it several times.
    """

    structure: bytes | bytearray
    tensors: list[Tensor]
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
        packed = PackedObject(self.structure, [_cloned(tensor) for tensor in self.tensors])
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


def pack(value: object) -> PackedObject:
    """Pack ``value`` together with classes and functions that a notebook or script defines.

    The packed object holds the tensors of ``value`` themselves, not copies. A module's attribute that cannot be pickled
    (a lock, an open file) becomes an `Unsendable`, which raises only when the network uses it. So do data sets and data
    loaders: few networks use them in ``forward``, and they may be larger than the network.

    Raises:
        Exception: if anything else cannot be pickled.
    """
    try:
        return _pack(value, leave_out=False)
    except Exception:  # pickling runs the user's code
        return _pack(value, leave_out=True)


def unpack(packed: PackedObject) -> Any:
    """Return the object that `pack` packed, with the tensors that the packed object holds now."""
    return _Unpacker(io.BytesIO(packed.structure), packed.tensors).load()


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
    """Stands for an object that was not sent to another process.

    Args:
        message: the error message of each use: which object, and why it was not sent.
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


def _pack(value: object, leave_out: bool) -> PackedObject:
    file = io.BytesIO()
    packer = _Packer(file, leave_out)
    packer.dump(value)
    return PackedObject(file.getvalue(), packer.tensors)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    def __init__(self, file: io.BytesIO, leave_out: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._leave_out = leave_out
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        if isinstance(value, Tensor) and is_distributed(value):
            pass  # the caller of `pack` replaces it by the gathered tensor
        elif type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.device.type not in ("cpu", "cuda"):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)], isinstance(value, nn.Parameter)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
            return _same, (value._torchdynamo_orig_callable,)  # compiled functions cannot be pickled
        if _is_data(value):
            name = type(value).__name__
            text = f"the network holds a {name}, which is not sent to the reference process because it holds data. "
            return Unsendable, (f"{text}Keep what forward needs of it as an attribute",)
        if isinstance(value, nn.Module):
            if parametrize.is_parametrized(value):
                # Its class was created at run time and cannot be pickled by name; this sends the class itself.
                return copyreg.__newobj__, (type(value),), _on_host(vars(value))  # type: ignore[attr-defined]
            if is_sharded(value):
                kind, state = undivided(value)
                sent = {name: _sendable(name, part) if self._leave_out else part for name, part in state.items()}
                return _empty, (kind,), _on_host(sent)
            if self._leave_out or isinstance(vars(value).get("_device"), torch.device):
                function, args, state = tuple(value.__reduce_ex__(pickle.HIGHEST_PROTOCOL))[:3]
                if self._leave_out:
                    state = {name: _sendable(name, part) for name, part in dict(state).items()}
                return function, args, _on_host(state)
        return super().reducer_override(value)


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


def _sendable(name: str, value: object) -> object:
    if isinstance(value, dict) and name in ("_modules", "_parameters", "_buffers"):
        return value
    try:
        _pack(value, leave_out=False)
    except Exception as error:  # pickling runs the user's code
        return Unsendable(
            f"the attribute {name!r} cannot be sent to the reference process: {type(error).__name__}: {error}. Create "
            "it in forward, or use background=False"
        )
    return value


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, number: tuple[int, bool]) -> Tensor:
        index, is_parameter = number
        if not is_parameter:
            return self._tensors[index]
        if index not in self._parameters:
            self._parameters[index] = nn.Parameter(self._tensors[index], requires_grad=False)
        return self._parameters[index]
