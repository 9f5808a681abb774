"""Which process holds which weights, gradients and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_egeria.core.network.forwards import Forward, ForwardReplacements
from lightning_egeria.errors import PipelineError
from lightning_egeria.methods.pipelining.messages import (
    Processes,
    loaded,
    lost_connection,
    receive_data,
    saved,
    send_data,
)

Holders = tuple[int, ...]


class StageWeights:
    """The parameters and buffers of a model, of which each process holds those that its stage reads.

    Args:
        model: the model.
        processes: all processes.
        holders: ranks that hold each parameter and buffer, by name; all hold those that are not named.
        foreign: modules whose weights this process does not hold.
    """

    def __init__(
        self, model: nn.Module, processes: Processes, holders: Mapping[str, Holders], foreign: Sequence[nn.Module]
    ) -> None:
        self._model, self._processes, self._foreign = model, processes, foreign
        self.holders = holders
        self._groups: dict[Holders, Any] = {}
        if processes.several:
            for ranks in sorted({ranks for ranks in holders.values() if len(ranks) > 1}):
                self._groups[ranks] = processes.group(ranks)
        self._strides: dict[str, tuple[int, ...]] = {}
        self._guards = ForwardReplacements()
        self._hook: Any = None

    @property
    def are_whole(self) -> bool:
        """Whether this process holds all weights."""
        return self._hook is None

    def _tensors(self) -> Iterator[tuple[str, Tensor, Holders]]:
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            yield name, tensor, self.holders.get(name, ())

    def release(self) -> None:
        """Free what other stages hold. Until `gather`, reading it is an error."""
        if not self._processes.several or not self.are_whole:
            return
        for name, tensor, ranks in self._tensors():
            if ranks and self._processes.rank not in ranks:
                self._strides[name] = tensor.stride()
                # One number in the shape of all: reading it is noticed, and writing to it is refused.
                empty = torch.full((), math.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
                tensor.data = empty.to(tensor.device).expand(tensor.shape)
                tensor.grad = None
        self._hook = self._model.register_state_dict_pre_hook(self._refuse)
        for module in self._foreign:
            self._guards.replace(module, self._refusing)

    def take_over(self, before: StageWeights) -> None:
        """Take the place of the object that freed the weights, with the same holders."""
        assert self.holders == before.holders, "only stages that stay where they are can do so"
        self._strides, self._hook, self._guards = before._strides, before._hook, before._guards

    def gather(self) -> None:
        """Bring all weights to all processes. Every process must call it."""
        if not self._processes.several or self.are_whole:
            return
        for name, tensor, ranks in self._tensors():
            if not ranks:
                continue
            if name in self._strides:
                tensor.data = torch.empty_strided(
                    tensor.shape, self._strides[name], dtype=tensor.dtype, device=tensor.device
                )
            sent = tensor.detach().contiguous()
            self._processes.broadcast(sent, ranks[0])
            if sent.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(sent)
        self._strides.clear()
        self._guards.restore()
        self._hook.remove()
        self._hook = None

    def _refuse(self, *_: Any) -> None:
        raise PipelineError("this process holds the weights of its stage only. Call gather() on all processes first")

    def _refusing(self, original: Forward) -> Forward:
        del original

        def forward(*_: Any, **__: Any) -> Any:
            self._refuse()

        return forward

    # gradients

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of weights that several ranks hold: devices of one stage, and tied weights."""
        parameters = dict(self._model.named_parameters())
        for ranks, group in self._groups.items():
            if self._processes.rank not in ranks:
                continue
            for name, weight in parameters.items():
                if self.holders.get(name) != ranks or not weight.requires_grad:
                    continue
                own = weight.grad if weight.grad is not None else torch.zeros_like(weight)
                flat = torch.cat([own.reshape(-1), own.new_tensor([weight.grad is not None])])
                with lost_connection("another rank"):
                    dist.all_reduce(flat, group=group)
                weight.grad = flat[:-1].view_as(weight).clone() if flat[-1] else None

    def gradient_norm(self) -> float:
        """Return the 2-norm of all gradients, on all ranks. Every process must call it."""
        own = torch.zeros((), dtype=torch.float64)
        for name, weight in self._model.named_parameters():
            first = self.holders.get(name, (0,))[0]
            if weight.grad is not None and first == self._processes.rank:
                own += weight.grad.detach().double().square().sum()
        return math.sqrt(sum(float(one) for one in self._processes.gather(own)))

    # optimizer state

    def gather_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer over all parameters, on rank 0; on other ranks the state of their stage.

        Every process must call it.
        """
        state = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for number, parameter in enumerate(parameters):
            holder = self.holders.get(names.get(id(parameter), ""), (0,))[0]
            if holder:
                found = self._moved(optimizer.state.get(parameter), holder, [0])
                if found is not None and self._processes.rank == 0:
                    state["state"][number] = found
        return state

    def keep_own_state(self, optimizers: Iterable[Optimizer]) -> None:
        """Drop the state that optimizers have of parameters of other stages."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for optimizer in optimizers:
            for parameter in list(optimizer.state):
                ranks = self.holders.get(names.get(id(parameter), ""), ())
                if ranks and self._processes.rank not in ranks:
                    del optimizer.state[parameter]

    def move_state(self, optimizers: Iterable[Optimizer], before: StageWeights) -> None:
        """Bring the state of optimizers from where the parameters were held to where they are held now.

        Every process must call it.

        Args:
            optimizers: of this process.
            before: where the parameters were held.
        """
        for optimizer in optimizers:
            for name, parameter in self._model.named_parameters():
                old, new = before.holders.get(name, ()), self.holders.get(name, ())
                receivers = [rank for rank in new if rank not in old]
                if not old or not receivers:
                    continue
                found = self._moved(optimizer.state.get(parameter), old[0], receivers)
                if found is not None and self._processes.rank in receivers:
                    optimizer.state[parameter] = found
        self.keep_own_state(optimizers)

    def _moved(self, state: Any, source: int, receivers: Sequence[int]) -> Any:
        rank = self._processes.rank
        with lost_connection("another rank"):
            if rank == source:
                data = saved(state or None)
                for receiver in receivers:
                    send_data(data, receiver)
            elif rank in receivers:
                return loaded(receive_data(source))
        return None
