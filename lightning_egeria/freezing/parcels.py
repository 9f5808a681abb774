"""Objects on their way to another process: their structure as bytes, their tensors as tensors.

A tensor is not written into the pickle. It stays a tensor until it is sent, so that taking a snapshot of a model is one
copy of its weights, and sending it holds no lock of the interpreter.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import types
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset

from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing.sharded import is_distributed, undivided
from lightning_egeria.tracing import is_sharded


@dataclasses.dataclass
class Parcel:
    """An object taken apart.

    Attributes:
        structure: the pickled object, with a number in the place of each tensor.
        tensors: those tensors, each once, however often the object holds it.
    """

    structure: bytes | bytearray
    tensors: list[Tensor]
    _copied: list[torch.cuda.Event] = dataclasses.field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """What sending it moves."""
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors)

    def to_host(self) -> Parcel:
        """The same with copies of the tensors in host memory, contiguous, which may be read after `wait`.

        From a GPU they are copied by a stream of its own into pinned memory, and nothing waits for them but the next
        kernel of the current stream, which may change them.
        """
        parcel = Parcel(self.structure, [_cloned(tensor) for tensor in self.tensors])
        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            parcel._fetch(device)
        return parcel

    def wait(self) -> None:
        """Return once the tensors are there."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _fetch(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for index, tensor in enumerate(self.tensors):
                if tensor.device == device:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    self.tensors[index] = host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
            event = torch.cuda.Event()
            event.record(stream)
        # The next optimizer step changes the weights: not before they are copied.
        torch.cuda.current_stream(device).wait_event(event)
        self._copied.append(event)


def pack(value: object) -> Parcel:
    """Take ``value`` apart; classes and functions of notebooks and scripts go along with it.

    The tensors of the parcel are those of ``value`` themselves. What cannot be pickled and hangs on a module as a plain
    attribute (a lock, an open file) becomes an `Unsendable`, which only complains when it is used. So do data sets and
    data loaders, of which hardly a network makes use in its forward, and which may be larger than it.

    Raises:
        Exception: whatever pickling raises for anything else that cannot be sent.
    """
    try:
        return _pack(value, leave_out=False)
    except Exception:  # pickling runs the user's own code
        return _pack(value, leave_out=True)


def unpack(parcel: Parcel) -> Any:
    """Put together what `pack` took apart, around the tensors that the parcel holds now."""
    return _Unpacker(io.BytesIO(parcel.structure), parcel.tensors).load()


class Unsendable:
    """Stands for what was not sent to another process; ``told`` says what and why."""

    def __init__(self, told: str) -> None:
        self._told = told

    def __getattr__(self, name: str) -> Any:
        """Complain.

        Raises:
            WorkerError: always, but for names that Python itself asks for.
        """
        if name.startswith("__") or name == "_told":
            raise AttributeError(name)
        raise WorkerError(self._told)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Complain.

        Raises:
            WorkerError: always.
        """
        raise WorkerError(self._told)


def _cloned(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous() if plain.is_cuda else plain.clone(memory_format=torch.contiguous_format)


def _pack(value: object, leave_out: bool) -> Parcel:
    file = io.BytesIO()
    packer = _Packer(file, leave_out)
    packer.dump(value)
    return Parcel(file.getvalue(), packer.tensors)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # it has no annotations
    def __init__(self, file: io.BytesIO, leave_out: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._leave_out = leave_out
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        if isinstance(value, Tensor) and is_distributed(value):
            pass  # whoever packs it puts the whole in its place
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
            return Unsendable, (f"a {name} is not sent to the process of the reference model, for it holds data",)
        if isinstance(value, nn.Module):
            if parametrize.is_parametrized(value):
                # Its class was made at run time and refuses to be pickled by name; this sends the class itself.
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
    """Attributes of a module, where the other side has its tensors: Lightning's keep the device that they were on."""
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
    except Exception as error:  # pickling runs the user's own code
        reason = f"{type(error).__name__}: {error}"
        return Unsendable(f"the attribute {name!r} cannot be sent to the process of the reference model: {reason}")
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
