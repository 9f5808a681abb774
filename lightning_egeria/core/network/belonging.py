"""What belongs to a layer module: the modules and parameters that freeze with it, and the calls that make it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_egeria.core.network.boundaries import Boundary
from lightning_egeria.core.network.tracing import ModuleCall, StepTrace


class Members:
    """The modules that freeze with each layer module: those that its boundary follows from, with their parts.

    Call `up_to` once for each layer module, in the order of the chain: each call returns what no earlier one has.

    Args:
        trace: trace of a training step.
        graph: autograd nodes that its loss follows from.
    """

    def __init__(self, trace: StepTrace, graph: set[Node]) -> None:
        self._modules = dict(trace.module.named_modules())
        self._paths = {part: path for path, part in self._modules.items()}
        self._calls: dict[str, list[ModuleCall]] = {}
        for call in trace.calls:
            self._calls.setdefault(call.path, []).append(call)
        self._nodes = {path: {n for call in calls for n in call.nodes_in(graph)} for path, calls in self._calls.items()}
        trained = {call for root in trace.roots if root.nodes_in(graph) for call in _subtree(root)}
        ends = {path: [call.end for call in calls if call in trained] for path, calls in self._calls.items()}
        self._last_end = {path: max(ends[path] or [calls[-1].end]) for path, calls in self._calls.items()}
        self._waiting = sorted(self._last_end, key=self._last_end.__getitem__)
        self._assigned: set[str] = set()
        self._passed: set[str] = set()  # paths of modules upstream of a boundary found so far
        self._before: set[ModuleCall] = set()  # calls whose output, without a gradient, went into those

    def up_to(self, boundary: Boundary, upstream: set[Node]) -> list[str]:
        """Return the paths of those that belong to no earlier one, in the order in which their calls ended.

        Args:
            boundary: where the layer module ends.
            upstream: autograd nodes that its output follows from.
        """
        self._follow(upstream)
        found = []
        for path in [path for path in self._waiting if self._last_end[path] <= boundary.end]:
            if path not in self._passed and not self._is_frozen_before(path):
                continue
            self._waiting.remove(path)
            for part in self._modules[path].modules():
                inner = self._paths[part]
                if keeps_its_mode(part) or (self._nodes.get(inner) and inner not in self._passed):
                    continue  # the latter trains, and the boundary does not follow from it: the head of another loss
                # A part with another call behind the boundary stays in the mode that this call needs.
                if inner not in self._assigned and self._last_end.get(inner, -1) <= boundary.end:
                    self._assigned.add(inner)
                    found.append(inner)
        return found

    def _is_frozen_before(self, path: str) -> bool:
        """Whether a module has weights that do not learn, and what follows it does; augmentation has none."""
        return not self._before.isdisjoint(self._calls[path]) and any(True for _ in self._modules[path].parameters())

    def unused(self, members: Sequence[str], names: Mapping[Tensor, str], trained: set[str]) -> list[nn.Parameter]:
        """Return the trainable parameters of modules that ran without them, such as a token for masked patches.

        Args:
            members: paths of modules.
            names: name of each parameter.
            trained: names of the parameters that the step trained.
        """
        own = (one for path in members if path in self._calls for one in self._modules[path].parameters(recurse=False))
        return [one for one in own if one.requires_grad and names.get(one, "") not in trained]

    def _follow(self, upstream: set[Node]) -> None:
        for path, nodes in self._nodes.items():
            if path in self._passed or nodes.isdisjoint(upstream):
                continue
            self._passed.add(path)
            waiting = list(self._calls[path])
            while waiting:
                new = [source for source in waiting.pop().sources if source not in self._before]
                self._before.update(new)
                waiting.extend(new)


class Units:
    """The outermost calls that make up each layer module, the last of which ends at its boundary.

    So do calls without a gradient, of layers that the user has frozen, if all calls that get their output make up this
    layer module or earlier ones. Call `up_to` once for each layer module, in the order of the chain.

    Args:
        trace: trace of a training step.
        graph: autograd nodes that its loss follows from.
    """

    def __init__(self, trace: StepTrace, graph: set[Node]) -> None:
        self._calls = trace.calls
        self._trained = {call for call in trace.calls if call.nodes_in(graph)}
        self._taken: set[ModuleCall] = set()
        self._around: set[ModuleCall] = set()  # a boundary lies inside
        self._readers: dict[ModuleCall, set[ModuleCall]] = {}  # of the output of calls without a gradient
        for call in trace.calls:
            for source in call.sources:
                if source not in self._trained and call.makes_output:
                    self._readers.setdefault(source, set()).add(call)

    def up_to(self, boundary: Boundary, upstream: set[Node]) -> tuple[str, ...]:
        """Return the paths of those that belong to no earlier one, in order."""
        self._around.update(around for call in boundary.calls for around in call.around)
        between = {
            call
            for call in self._calls[: boundary.end + 1]
            if call not in self._taken and call not in self._around and call.nodes_in(upstream)
        }
        self._around.update(boundary.calls)
        self._taken |= between
        between |= self._take(self._readers.keys() - self._taken)
        outermost = (call for call in self._calls if call in between and call.parent not in between)
        return tuple(dict.fromkeys(call.path for call in outermost))

    def _take(self, calls: Set[ModuleCall]) -> set[ModuleCall]:
        """Take and return those whose output only taken calls and calls around a boundary get."""
        found = set()
        for call in sorted(calls, key=lambda call: -call.end):  # behind its readers
            readers = self._readers.get(call, set())
            if not self._is_taken(call.parent) and all(one in self._around or self._is_taken(one) for one in readers):
                self._taken.add(call)
                found.add(call)
        return found

    def _is_taken(self, call: ModuleCall | None) -> bool:
        """Whether a call, or one around it, belongs to a layer module."""
        return call is not None and (call in self._taken or self._is_taken(call.parent))


def keeps_its_mode(module: nn.Module) -> bool:
    """Whether a module inside frozen layers keeps its mode; freezing its parts is enough.

    ``nn.TransformerEncoder`` assumes that all layers have the mode of the first, and would pass padded batches as
    nested tensors to layers that still train.
    """
    return isinstance(module, nn.TransformerEncoderLayer)


def _subtree(call: ModuleCall) -> list[ModuleCall]:
    found = [call]
    for node in found:
        found.extend(node.children)
    return found
