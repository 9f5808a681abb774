"""One training step, watched and then run again: can cached activations stand for the prefix, and on what terms?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_egeria.batches.tree import tensor_leaves
from lightning_egeria.caching.arguments import (
    GivenInput,
    Layout,
    OtherArguments,
    Part,
    is_given,
    order_of,
    shares_memory,
)
from lightning_egeria.caching.bypass import Passage, PrefixBypass
from lightning_egeria.caching.findings import Findings, InputField, VaryingField
from lightning_egeria.caching.hooks import BatchHooks
from lightning_egeria.caching.made import UNKNOWN, MadeArguments
from lightning_egeria.caching.proof import NO_ROWS, Proof, Prover
from lightning_egeria.caching.steps import Step
from lightning_egeria.caching.terms import Terms
from lightning_egeria.caching.watch import StepWatch, methods_seen
from lightning_egeria.network.calls import CallRecorder
from lightning_egeria.network.compilation import eager
from lightning_egeria.network.prefix import FrozenPrefix


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an examination has found.

    Attributes:
        problem: why activations of this boundary cannot stand for the prefix; None if they can.
        shallower: by how many layer modules less a boundary may do better; 0: by none.
        again: nothing was found, because of the batch; another one may show more.
        terms: on which they can.
        reason_to_load: why inputs have to be loaded all the same; None: they need not.
    """

    problem: str | None = None
    shallower: int = 0
    again: bool = False
    terms: Terms | None = None
    reason_to_load: str | None = None


class Examination:
    """Watches one training step.

    Args:
        prefix: that is frozen.
        bypass: of the part of it that would be left out.
        step: with the whole input, on its device; its activation is kept in ``computed``.
        findings: about its samples.
        compiled: whether the network is.
        hooks: of the user.
        made_varies: what the training step makes of a sample was seen not to be the same each time.

    Attributes:
        autocast: device type and dtype of the autocast that the step ran in; None: it did not.
    """

    def __init__(
        self,
        prefix: FrozenPrefix,
        bypass: PrefixBypass,
        step: Step,
        findings: Findings,
        compiled: bool,
        hooks: BatchHooks,
        made_varies: bool,
    ) -> None:
        self.autocast: tuple[str, torch.dtype] | None = None
        self._prefix = prefix
        self._bypass = bypass
        self._step = step
        self._findings = findings
        self._compiled = compiled
        self._hooks = hooks
        self._made_varies = made_varies
        self._has_drawn = False
        self._modules = dict(prefix.module.named_modules())
        self._inputs: list[GivenInput] = []
        self._others = OtherArguments(set())
        self._made: set[int] = set()  # arguments with a row for each sample that are not of the batch, for the watch
        self._gradients: list[Tensor] = []
        self._context = contextlib.ExitStack()
        self._recorder = CallRecorder(self._modules, prefix.chain.entries, lambda t: t.detach().clone())
        self._passage = Passage(entered=self._entered, left=self._left)
        self._watch = StepWatch(step.source, self._passage)

    def begin(self) -> None:
        """The forward of the step comes next."""
        self._bypass.begin(self._passage)  # outermost, because it ends last
        self._recorder.start()
        self._context.callback(self._recorder.stop)
        self._context.enter_context(eager())  # or the watch would see compiled code instead of operations
        self._context.enter_context(methods_seen(self._watch))
        self._context.enter_context(self._watch)

    def end_forward(self) -> None:
        """The forward is over. Safe to call twice."""
        if self._varies() is not None:
            for output in self._recorder.outputs:
                if output.requires_grad:
                    output.register_hook(self._gradient_of(output))
        self._context.close()
        self._bypass.end()

    def verdict(self) -> Verdict:
        """Decide, once the step is over."""
        findings, step, calls = self._findings, self._step, self._recorder.calls
        if findings.problem is not None:
            return Verdict(findings.problem)
        if self._passage.reached is None or step.computed is None:
            return Verdict(again=True)  # a step that did not run the network
        # What the step itself has made may be given to layers behind the boundary, and so may parts of rows.
        behind = self._watch.only_behind
        self._inputs = [one for one in self._inputs if not isinstance(one.layout, Part) or one.leaf not in behind]
        self._made -= behind
        problem = self._problem_of_made()
        if problem is not None:
            return Verdict(problem, self._layers_that_read_made())
        if any(one.leaf not in findings.own_rows for one in self._inputs):
            return Verdict(
                "the collate function mixes or reorders samples, or normalises over the batch, so a row of the "
                "network's input is not that of one sample"
            )
        if len(calls) != len({call.entry for call in calls}):
            return Verdict("the training step calls the network more than once")
        if step.computed.shape[:1] != (step.samples,):  # frames or crops lie there
            return Verdict(NO_ROWS, 1)
        if self._watch.prefix_used is not None:
            return Verdict(f"{self._watch.prefix_used} behind the boundary uses what was computed in front of it", 1)
        given = {one.leaf: one.argument for one in reversed(self._inputs)}
        field = next((field for field in findings.inputs if field.batch_leaf in given), None)
        varying = self._varies()
        self._bypass.learn(self._passage, step.length)
        proof = Prover(
            self._modules,
            self._bypass,
            calls,
            self._passage,
            given[field.batch_leaf] if field is not None else None,
            self.autocast,
            self._compiled,
            varying.lengths if varying is not None else None,
            step.length,
        ).prove(step.computed)
        if proof.problem is None and proof.padding_comes_out and not self._padding_is_not_learnt():
            proof = Proof("the loss depends on positions behind the end of shorter samples", True)
        if proof.problem is not None or proof.again:
            return Verdict(proof.problem, int(proof.repairable), proof.again)
        return self._on_terms(proof, field)

    def _layers_that_read_made(self) -> int:
        """How many layer modules there are from the first that reads what was made to the boundary; 0: all."""
        front = [units for number, units in self._watch.read_in_front.items() if number in self._made]
        return self._bypass.depth - self._bypass.depth_at(min(front)) if front and self._inputs else 0

    def _problem_of_made(self) -> str | None:
        """Why what the training step has made for the frozen front cannot be known again."""
        if not self._made and not self._inputs:
            return "the network is not given a row for each sample of the batch"
        if not self._made:
            return None
        if self._made_varies:
            return "what the training step makes of a sample for the network is not the same each time"
        if self._has_drawn:
            return (
                "random numbers are drawn between the data loader and the network (mixing of samples, augmentation?), "
                "so its frozen front has no fixed output for a sample"
            )
        if self._findings.varying and self._varies() is None:
            return "the training step changes padded samples before it gives them to the network"
        return None

    def _on_terms(self, proof: Proof, field: InputField | None) -> Verdict:
        step, findings, varying = self._step, self._findings, self._varies()
        used = self._watch.input_used.get(field.batch_leaf) if field is not None else None
        made = MadeArguments(sorted(number - len(step.source) for number in self._made))
        absent = field is not None and proof.without_input and used is None and self._hooks.reason is None
        absent = absent and not made.numbers
        reason = (
            findings.must_load
            or self._hooks.reason
            or ("the network is given what is made of them" if made.numbers else None)
            or (f"{used} uses them" if used else "more than the prefix needs them")
        )
        ragged = varying is not None and proof.ragged
        self._others.leave_free({number - len(step.source) for number in self._watch.only_behind} | set(made.numbers))
        call = self._recorder.calls[0]
        given = list(tensor_leaves((call.args, call.kwargs)))
        # What is found shows what they are padded with; a copy may lie in memory otherwise, and so have another digest.
        found = made.digests(given, step.samples, varying.lengths if ragged and varying else None, step.length)
        if (found == UNKNOWN).any():
            return Verdict(
                "what the training step makes of a sample for the network cannot be known again (differing padding?)",
                self._layers_that_read_made(),
            )
        terms = Terms(
            inputs=self._inputs,
            made=made,
            others=self._others,
            input_field=field if absent else None,
            input_order=order_of(list(tensor_leaves(step.loaded.batch))[field.batch_leaf]) if field is not None else (),
            structure=findings.structure,
            length_leaf=varying.sample_leaf if varying is not None and ragged else None,
            length_batch_leaf=varying.batch_leaf if varying is not None and ragged else None,
            # The proof ran uncompiled code, which may round otherwise: whole batches show what the compiled code gives.
            exact=proof.exact or self._compiled,
            sizes=set() if self._compiled else set(proof.sizes),
            first_size=step.samples,
            single=self._passage.single and not self._compiled,
            compiled=self._compiled,
            may_change=self._hooks.change,
        )
        return Verdict(terms=terms, reason_to_load=None if absent else reason)

    def _varies(self) -> VaryingField | None:
        """The input whose samples differ in length, if one does."""
        given = {one.leaf for one in self._inputs}
        return next((field for field in self._findings.varying if field.batch_leaf in given), None)

    def _entered(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the tensors of the batch among the arguments of the network."""
        step = self._step
        kind = step.device.type
        self.autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        before = list(tensor_leaves(step.loaded.batch))
        self._has_drawn = step.has_drawn()
        with _disable_current_modes():
            for number, argument in enumerate(tensor_leaves((args, kwargs))):
                if not argument.ndim or argument.shape[0] != step.samples:
                    continue
                given = self._source_of(number, argument)
                leaf = given.leaf if given is not None else len(before)
                if given is None or leaf >= len(before) or not (step.came_as_loaded(leaf) and step.is_untouched(leaf)):
                    self._made.add(len(step.source) + number)
                else:
                    self._inputs.append(given)
        varying = self._varies()
        if varying is not None:
            step.length = step.source[varying.batch_leaf].shape[1]
        self._others = OtherArguments({one.argument for one in self._inputs})
        with _disable_current_modes():
            self._others.changed(args, kwargs, step.samples, step.length)
        for number, argument in self._others.tensors(args, kwargs):
            self._watch.follow(argument, len(step.source) + number)

    def _source_of(self, number: int, argument: Tensor) -> GivenInput | None:
        """Which tensor of the batch an argument is, or part of each of its rows; None: of none."""
        source = self._step.source
        # A mask may be equal to a cast of the tokens: the tensor itself comes first, then one of its dtype.
        match = [
            (not shares_memory(leaf, argument), leaf.dtype != argument.dtype, i)
            for i, leaf in enumerate(source)
            if is_given(leaf, argument)
        ]
        if match:
            copied, _, leaf = min(match)
            return GivenInput(number, leaf, None if copied else Layout.of(source[leaf], argument))
        padded = {field.batch_leaf for field in self._findings.varying}  # whose length is another in each batch
        for place, tensor in enumerate(source):
            if place not in padded and shares_memory(tensor, argument):
                part = Part.of(tensor, argument)
                if part is not None:
                    return GivenInput(number, place, part)
        return None

    def _left(self, activation: Tensor) -> None:
        self._step.computed = activation.detach().clone(memory_format=torch.preserve_format)

    def _gradient_of(self, output: Tensor) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._gradients.append(gradient.detach().clone())

        return keep

    def _padding_is_not_learnt(self) -> bool:
        """Whether the loss is blind to what the network gives behind the end of each sample: no gradient comes back."""
        varying, length = self._varies(), self._step.length
        if varying is None or length is None or not self._gradients:
            return False
        kept = torch.arange(length) < torch.tensor(varying.lengths)[:, None]
        by_position = [g for g in self._gradients if tuple(g.shape[:2]) == tuple(kept.shape)]
        return not any(gradient[~kept.to(gradient.device)].count_nonzero() for gradient in by_position)
