"""In whatever order things happen: what policies decide, what the runner compares with, what the decider believes."""

import dataclasses
import functools
import json
import math
import time
from concurrent.futures import Future
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.freezer import Decision, Freezer
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.observers import Observers
from lightning_egeria.errors import WorkerError
from lightning_egeria.freezing import runner as runner_module
from lightning_egeria.freezing.comparison import ReferenceComparison
from lightning_egeria.freezing.decide import Decider
from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.freezing.reference import EvaluationRequest, EvaluationResult
from lightning_egeria.freezing.runner import ReferenceRunner
from lightning_egeria.freezing.scripted import ScriptedPolicy
from lightning_egeria.freezing.slopes import SlopePolicy

NAN, INF = math.nan, math.inf
SETTINGS = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)

POLICIES = {
    "freezing": lambda patience: FreezingPolicy(tolerance=1.0, patience=patience),
    "pretrained": lambda patience: FreezingPolicy(tolerance=1.0, patience=patience, pretrained=True),
    "never unfreezing": lambda patience: FreezingPolicy(tolerance=1.0, patience=patience, unfreeze_on="never"),
    "slopes": lambda patience: SlopePolicy(window_evaluations=2, patience=patience, bootstrap=False),
    "bootstrapped slopes": lambda patience: SlopePolicy(window_evaluations=2, patience=patience),
    "scripted": lambda patience: ScriptedPolicy({2: 1, 4 * patience: 0, 5 * patience: 1}),
}
# Calm, moving, and what no evaluation should give.
VALUES = st.sampled_from([0.0, 0.5, 1.0, 4.0, 64.0, -1.0, 1e-320, 1e300, NAN, INF, -INF])


class PolicyMachine(RuleBasedStateMachine):
    """Evaluations that are late, lost, doubled or nonsense, rates that jump, checkpoints at any moment.

    A second policy is put together anew from a checkpoint now and then, and must go on deciding as the first does.
    """

    kind = ""

    @initialize(max_depth=st.integers(1, 3), behind=st.integers(1, 2), patience=st.integers(1, 3))
    def begin(self, max_depth, behind, patience):
        self.new = functools.partial(POLICIES[self.kind], patience)
        self.max_depth, self.modules = max_depth, max_depth + behind
        self.policy, self.twin = self.started(), self.started()
        self.step, self.depth, self.rate = 0, 0, 0.1
        self.rates, self.kept = {0.1}, []

    def started(self):
        policy = self.new()
        policy.start(self.max_depth)
        return policy

    @rule(values=st.lists(VALUES, min_size=5, max_size=5), is_kept=st.booleans(), loss=VALUES)
    def evaluation(self, values, is_kept, loss):
        row = [NAN] * self.depth + values[self.depth : self.modules]
        if is_kept:
            self.kept.append(row)
        self.observe(row, loss)

    @rule(value=st.sampled_from([0.0, 0.5, 4.0]), times=st.integers(1, 12), resumed=st.integers(0, 4))
    def calm(self, value, times, resumed):
        for place in range(times):
            if place == resumed:
                self.checkpoint()
            self.observe([NAN] * self.depth + [value] * (self.modules - self.depth), 1.0)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def an_old_evaluation_comes_again(self, data):
        """Late, or doubled: with NaN in front where it was made of a deeper prefix."""
        self.observe(data.draw(st.sampled_from(self.kept)), 1.0)

    @rule(loss=VALUES | st.none(), empty=st.booleans())
    def no_evaluation(self, loss, empty):
        self.observe([] if empty else None, loss)

    @rule(rate=st.sampled_from([0.0, 1e-9, 0.001, 0.01, 0.1, 1.0, -0.1, NAN, INF]))
    def new_rate(self, rate):
        self.rate = rate
        self.rates.add(rate)
        self.observe(None, None)

    @rule()
    def checkpoint(self):
        state = json.loads(json.dumps(self.policy.state_dict()))
        self.twin = self.started()
        self.twin.load_state_dict(state)

    def observe(self, row, loss):
        self.step += 1
        decision, twin = (p.observe(self.step, row, self.rate, loss) for p in (self.policy, self.twin))
        assert repr(decision) == repr(twin)
        if decision is None:
            return
        assert 0 <= decision.depth <= self.max_depth
        assert decision.reason
        if self.kind != "scripted":
            if decision.depth > 0:
                assert decision.depth > self.depth
                assert row
                assert all(map(math.isfinite, row[self.depth :]))
                assert self.rate != 0
            else:
                assert self.depth > 0
                assert len(self.rates) > 1
                assert self.kind != "never unfreezing"
        self.depth = decision.depth

    @invariant()
    def in_bounds(self):
        assert getattr(self.policy, "depth", self.depth) == self.depth
        assert self.depth < self.max_depth or not self.policy.wants_reference
        assert repr(self.policy.state_dict()) == repr(self.twin.state_dict())


@pytest.mark.parametrize("kind", POLICIES)
def test_policies(kind):
    run_state_machine_as_test(type("Machine", (PolicyMachine,), {"kind": kind}), settings=SETTINGS)


# --- the runner, with a process that the test holds in its hands ------------------------------------------------------


MADE = []  # processes of the test that runs


class HeldWorker:
    """Does nothing until it is told to; then in order, as a process would."""

    def __init__(self, make, threads=1):
        self.target, self.calls, self.ended, self.killed = make(), [], False, False
        MADE.append(self)

    @property
    def idle(self):
        return not self.calls

    def call(self, *parcels):
        answer = Future()
        if self.killed:
            self.ended = True
            answer.set_exception(WorkerError("it had ended"))
        else:
            self.calls.append((parcels, answer))
        return answer

    def answer(self):
        parcels, answer = self.calls.pop(0)
        try:
            received = [dataclasses.replace(parcel, received=True) for parcel in parcels]
            answer.set_result(self.target(*map(runner_module.unpack, received)))
        except Exception as error:
            answer.set_exception(WorkerError(str(error)))

    def kill(self, reason):
        self.killed = True
        for _, answer in self.calls:
            self.ended = True
            answer.set_exception(WorkerError(reason))
        self.calls = []

    def close(self):
        self.kill("closed")


class Reference:
    """Tells what it compares: the weight of the snapshot, and that of the network of the evaluation."""

    def __init__(self):
        self.snapshot = None

    def __call__(self, evaluation, snapshot):
        if snapshot is not None:
            self.snapshot = float(snapshot[""].weight)
        if evaluation.calls == ["fail"]:
            raise ValueError("broken")
        return self.snapshot, float(evaluation.network[""].weight)


class Unreadable:
    """Cannot be unpacked on the other side."""

    def __reduce__(self):
        return float, ("it is none",)


class RunnerMachine(RuleBasedStateMachine):
    """Whether its process answers, hangs or dies: an answer is of the newest snapshot of when it was asked for."""

    @initialize(background=st.booleans())
    def begin(self, background):
        MADE.clear()
        self.net = nn.Linear(1, 1, bias=False)
        self.runner = ReferenceRunner(Reference, ("",), background, timeout_s=10.0)
        self.asked, self.count, self.background = [], 0, background
        self.take_snapshot()

    def teardown(self):
        if hasattr(self, "runner"):
            self.runner.drop_snapshot()
            assert all(worker.killed for worker in MADE)

    def next_weight(self):
        self.count += 1
        with torch.no_grad():
            self.net.weight.fill_(self.count)
        return float(self.count)

    @rule()
    def take_snapshot(self):
        self.newest = self.next_weight()
        self.runner.take_snapshot(self.net)

    @rule()
    def drop_snapshot(self):
        self.runner.drop_snapshot()
        assert not self.runner.has_snapshot
        assert self.runner.worker is None
        self.take_snapshot()

    @rule(fails=st.booleans())
    def submit(self, fails):
        weight = self.next_weight()
        ready = self.runner.ready()
        answer = self.runner.submit(EvaluationRequest(["fail"] if fails else [], {"": self.net}, 0))
        assert (answer is not None) == ready
        if answer is not None:
            self.asked.append((answer, self.newest, weight))

    def busy(self):
        return [worker for worker in MADE if worker.calls]

    @precondition(lambda self: self.busy())
    @rule()
    def answer(self):
        (worker,) = self.busy()
        worker.answer()

    @precondition(lambda self: self.runner.worker)
    @rule()
    def die(self):
        self.runner.worker.kill("it died")

    @precondition(lambda self: self.busy())
    @rule()
    def hang(self):
        """Longer than is waited for."""
        with mock.patch.object(runner_module, "time", mock.Mock(monotonic=lambda: time.monotonic() + 20.0)):
            assert self.runner.ready()

    @invariant()
    def answers_are_of_the_snapshot_they_were_asked_with(self):
        for answer, snapshot, weight in self.asked:
            if answer.done() and answer.exception() is None:
                assert answer.result() == (snapshot, weight)
        self.asked = [asked for asked in self.asked if not asked[0].done()]
        assert len(self.asked) <= self.background
        assert (self.runner.worker is not None) == self.background
        assert sum(not worker.killed for worker in MADE) <= self.background


def test_runner(monkeypatch):
    monkeypatch.setattr(runner_module, "Worker", HeldWorker)
    run_state_machine_as_test(RunnerMachine, settings=SETTINGS)


@pytest.mark.parametrize("background", [False, True])
def test_a_snapshot_that_did_not_arrive_is_sent_again(background, monkeypatch):
    monkeypatch.setattr(runner_module, "Worker", HeldWorker)
    MADE.clear()
    net = nn.Linear(1, 1, bias=False)
    runner = ReferenceRunner(Reference, ("",), background, timeout_s=10.0)

    def ask(*calls):
        answer = runner.submit(EvaluationRequest(list(calls), {"": net}, 0))
        for worker in MADE:
            worker.answer()
        return answer

    for weight in (1.0, 2.0):
        nn.init.constant_(net.weight, weight)
        runner.take_snapshot(net)
        with pytest.raises((WorkerError, ValueError), match="could not convert"):
            ask(Unreadable()).result(0)
        assert ask().result(0) == (weight, weight)
    runner.drop_snapshot()


# --- the decider and the comparison with the reference ----------------------------------------------------------------


class HeldRunner:
    """Answers when the test says so, in any order."""

    def __init__(self):
        self.has_snapshot, self.busy, self.asked = False, False, []

    def ready(self):
        return not self.busy

    def take_snapshot(self, module, weights=None):
        self.has_snapshot = True

    def drop_snapshot(self):
        self.has_snapshot = False

    def submit(self, evaluation, weights=None):
        if self.busy:
            return None
        self.asked.append((Future(), evaluation.first))
        return self.asked[-1][0]


class Believer:
    """A policy that checks what it is told against what may be believed, and decides what it is told to."""

    wants_reference = True

    def __init__(self, machine, refresh):
        self.machine, self.refresh = machine, refresh
        self.decision, self.evaluations = None, 0

    @property
    def holds_reference(self):
        return self.evaluations % self.refresh > 0

    def start(self, max_depth):
        pass

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        self.evaluations += loss is not None
        if plasticity is not None:
            self.machine.check(step, plasticity)
        decision, self.decision = self.decision, None
        return decision


class DeciderMachine(RuleBasedStateMachine):
    """Freezes, unfreezes, refreshes, answers that are late, lost or failed: nothing stale is ever believed."""

    @initialize(every=st.integers(1, 2), refresh=st.integers(1, 3))
    def begin(self, every, refresh):
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        for layer in self.net:
            layer.register_buffer("statistic", torch.zeros(1))  # so that it is in evaluation mode while it is frozen
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        chain = LayerChain.trace(self.net, lambda: self.net(torch.ones(2, 2)).sum())
        self.freezer, self.runner, self.policy = Freezer(self.net, chain), HeldRunner(), Believer(self, refresh)
        self.prefix, self.every = self.freezer.prefix, every
        told = mock.create_autospec(Notices, instance=True)
        self.comparison = ReferenceComparison(self.freezer, self.policy, self.runner, every, samples=4, notices=told)
        self.decider = Decider(self.freezer, self.policy, self.comparison)
        self.observers = Observers(self.freezer, self.comparison)
        self.evaluations = self.comparison.evaluations
        self.comparison.refresh_reference()
        # Of each future: number of its evaluation, step and prefix version when it was made.
        self.made, self.believed, self.step, self.depth, self.version = {}, set(), 0, 0, 0
        self.decided = None

    def teardown(self):
        if hasattr(self, "observers"):
            self.observers.abort()
            self.comparison.close()
            self.freezer.close()
            assert not self.runner.has_snapshot
            assert all(parameter.requires_grad for parameter in self.net.parameters())

    @rule(count=st.integers(1, 4), answers=st.booleans())
    def train(self, count, answers):
        for _ in range(count):
            version, decided = self.prefix.version, self.policy.decision
            self.observers.batch_start(None, self.step)
            loss = self.net(torch.ones(3, 2)).square().mean()
            self.observers.forward_end(loss)
            self.optimizer.zero_grad()
            loss.backward()
            self.observers.backward_end()
            self.optimizer.step()
            self.observers.batch_end()
            self.step += 1
            decision = self.decider.decide(self.step, learning_rate=0.1)
            event = self.freezer.freeze_to(decision.depth, decision.reason) if decision is not None else None
            self.observers.optimizer_step(self.step)
            for answer, first in self.runner.asked:
                if answer not in self.made:  # it was asked for before anything was decided
                    self.made[answer] = (len(self.made), self.step, version)
                    assert first == self.depth
            wanted = decided is not None and decided.depth != self.depth
            assert (event is not None) == wanted
            assert self.prefix.version == version + wanted
            self.depth = decided.depth if decided is not None else self.depth
            if answers:
                self.answer_all()

    def answer_all(self):
        for answer, _ in self.runner.asked:
            self.resolve(answer)

    def resolve(self, answer):
        if not answer.done():
            number = self.made[answer][0]
            # Its number tells the evaluation when the policy hears of it.
            answer.set_result(EvaluationResult((float(number),) * 4, 3, False, "float32", "", 0.0))

    def open(self):
        return [answer for answer, _ in self.runner.asked if not answer.done()]

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def answer_one(self, data):
        self.resolve(data.draw(st.sampled_from(self.open())))

    @precondition(lambda self: self.open() and self.evaluations.counts.failed < 2)
    @rule(data=st.data())
    def fail_one(self, data):
        data.draw(st.sampled_from(self.open())).set_exception(WorkerError("it died"))

    @precondition(lambda self: self.runner.asked)
    @rule()
    def an_answer_is_lost(self):
        self.runner.asked = [asked for asked in self.runner.asked if asked[0].done()]

    @rule(busy=st.booleans())
    def the_process_is_busy(self, busy):
        self.runner.busy = busy

    @rule(depth=st.integers(0, 3))
    def decide(self, depth):
        self.policy.decision = Decision(min(depth, self.prefix.chain.max_depth), "drawn")

    @rule()
    def batch_without_an_end(self):
        self.observers.batch_start(None, self.step)
        self.observers.abort()

    @rule()
    def checkpoint(self):
        state = self.comparison.state_dict(with_reference=False)
        assert all(answer is None for answer in state["pending"])

    def check(self, step, plasticity):
        """What a policy is told of: evaluations in their turn, in time, of the prefix as it is now, and once."""
        numbers = set(plasticity)
        assert len(numbers) == 1
        number = int(plasticity[0])
        (made,) = [made for made in self.made.values() if made[0] == number]
        assert made[2] == self.prefix.version
        assert 1 <= step - made[1] <= self.every
        assert all(number > earlier for earlier in self.believed)
        self.believed.add(number)

    @invariant()
    def prefix_is_contiguous(self):
        frozen = [not any(p.requires_grad for p in layer.parameters()) for layer in self.net]
        assert frozen == [place < self.depth for place in range(4)]
        assert [not layer.training for layer in self.net] == frozen
        assert self.prefix.depth == self.depth
        assert self.prefix.version >= self.version
        self.version = self.prefix.version

    @invariant()
    def all_are_accounted_for(self):
        counts = self.evaluations.counts
        assert counts.done == len(self.believed)
        assert len(self.evaluations.state_dict(with_answers=False)["pending"]) <= 1
        if not self.evaluations.stopped:
            assert self.comparison.reference_age == self.policy.evaluations % self.policy.refresh


def test_decider():
    run_state_machine_as_test(DeciderMachine, settings=SETTINGS)
