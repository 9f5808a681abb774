"""The processes of one job: the first decides what freezes, and all do it after the same step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_egeria.errors import DisagreementError
from lightning_egeria.freezing.sharded import is_distributed
from lightning_egeria.layers import FrozenPrefix

WORD_BYTES = 512  # of the one broadcast of an evaluation step


@dataclasses.dataclass(frozen=True)
class Word:
    """What the first rank tells the others at an evaluation step.

    Attributes:
        depth: frozen depth from here on.
        evaluate_every_n_steps: optimizer steps until the next word.
        reason: why the depth changes; empty if it does not.
    """

    depth: int
    evaluate_every_n_steps: int
    reason: str = ""

    def packed(self) -> bytes:
        """As `WORD_BYTES` bytes; a reason that is too long is cut.

        >>> word = Word(3, 50, "calm" * 1000)
        >>> len(word.packed()), Word.unpacked(word.packed()).depth
        (512, 3)
        """
        room = WORD_BYTES - len(json.dumps([self.depth, self.evaluate_every_n_steps, ""]))
        reason = self.reason.encode("ascii", "replace").decode()[:room]
        while len(json.dumps(reason)) - 2 > room:  # quotation marks and the like take two
            reason = reason[:-1]
        return json.dumps([self.depth, self.evaluate_every_n_steps, reason]).encode().ljust(WORD_BYTES)

    @classmethod
    def unpacked(cls, data: bytes) -> Word:
        """The word as `packed` gave it."""
        return cls(*json.loads(data))


class Ranks:
    """All processes that train one model, of which the first, of the whole job, decides.

    Without `torch.distributed`, or with one process, it leads itself and nothing is sent.

    Args:
        device: where tensors must be for the backend to send them.

    Attributes:
        leads: whether this process decides.
        several: whether there are others.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None else torch.device("cpu")
        joined = dist.is_available() and dist.is_initialized()
        self.several = joined and dist.get_world_size() > 1
        self.leads = not self.several or dist.get_rank() == 0

    def agree(self, word: Word | None) -> Word:
        """The word of the first rank, on all. One broadcast of `WORD_BYTES` bytes; every rank must call it.

        Args:
            word: what this rank says; only that of the first counts, the others may give None.
        """
        if not self.several:
            assert word is not None, "who leads must say something"
            return word
        data = self._broadcast(word.packed() if word is not None and self.leads else bytes(WORD_BYTES))
        return Word.unpacked(data)

    def share(self, value: Any) -> Any:
        """Plain types from the first rank to all, of any size: two broadcasts. Every rank must call it.

        Args:
            value: of the first rank; what the others give does not count.
        """
        if not self.several:
            return value
        data = json.dumps(value).encode() if self.leads else b""
        size = int.from_bytes(self._broadcast(len(data).to_bytes(8, "little")), "little")
        return json.loads(self._broadcast(data if self.leads else bytes(size)))

    def share_buffers(self, prefix: FrozenPrefix, depth: int) -> None:
        """Give all ranks the buffers that the first ``depth`` layer modules have on the first: statistics, say.

        While they learn, each rank may have its own. Frozen, they are what the layers compute with. One broadcast;
        every rank must call it.
        """
        buffers = list(prefix_buffers(prefix, depth).values()) if self.several else []
        if not buffers:
            return
        sent = torch.cat([_bytes_of(buffer) for buffer in buffers]).to(self._device)
        dist.broadcast(sent, 0)
        if not self.leads:
            for buffer, data in zip(buffers, sent.split([buffer.nbytes for buffer in buffers]), strict=True):
                # Cloned, because a piece of the whole may begin where its dtype must not.
                buffer.copy_(data.clone().view(buffer.dtype).view(buffer.shape))

    def compare(self, prefix: FrozenPrefix) -> None:
        """See that all ranks have the same prefix and the same parameters. Every rank must call it.

        Compared are the version and depth, a fingerprint of the prefix (its parameters and buffers), and one of all
        parameters; of those that are sharded, no rank has a copy to compare.

        Raises:
            DisagreementError: on all ranks, if one differs from the first.
        """
        if not self.several:
            return
        told = {
            "depth and version": repr((prefix.depth, prefix.version)).encode(),
            "weights and buffers of the prefix": fingerprint(prefix_tensors(prefix)),
            "parameters": fingerprint(dict(prefix.module.named_parameters())),
        }
        mine = torch.stack([_digest(data) for data in told.values()]).to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        for rank, other in enumerate(everyone):
            for row, what in enumerate(told):
                if not torch.equal(other[row], everyone[0][row]):
                    raise DisagreementError(
                        f"the {what} of rank {rank} are not those of rank 0, with {prefix.depth} layer modules frozen: "
                        "the ranks no longer train one model. Something changes weights on one of them only"
                    )

    def _broadcast(self, data: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.broadcast(tensor, 0)
        return bytes(tensor.cpu().numpy())


def prefix_buffers(prefix: FrozenPrefix, depth: int) -> dict[str, Tensor]:
    """Buffers of the first ``depth`` layer modules by name."""
    members = set(prefix.chain.members(depth))
    return {name: buffer for name, buffer in prefix.module.named_buffers() if name.rpartition(".")[0] in members}


def prefix_tensors(prefix: FrozenPrefix) -> dict[str, Tensor]:
    """Parameters of the frozen layer modules by name, and buffers of those that are settled."""
    parameters = dict(prefix.module.named_parameters())
    frozen = {name: parameters[name] for name in prefix.chain.prefix_parameters(prefix.depth)}
    return frozen | prefix_buffers(prefix, prefix.settled_depth)


def fingerprint(tensors: dict[str, Tensor]) -> bytes:
    """Of names and values; 32 bytes. Tensors that are sharded over the ranks count by name only.

    >>> layer = torch.nn.Linear(2, 2)
    >>> before = fingerprint(dict(layer.named_parameters()))
    >>> before == fingerprint(dict(layer.named_parameters()))
    True
    >>> layer.bias.data[0] += 1
    >>> before == fingerprint(dict(layer.named_parameters()))
    False
    """
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(name.encode())
        if not is_distributed(tensor):
            state.update(_bytes_of(tensor).cpu().numpy().data)
    return state.digest()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digest(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.uint8)
