"""A reference, a policy and notices that a test holds in its hands, with a few training steps around them."""

import functools
from concurrent.futures import Future

import torch
from torch import nn

from lightning_egeria.core.network.chain import LayerChain
from lightning_egeria.core.training.freezer import Freezer
from lightning_egeria.core.training.observers import Observers
from lightning_egeria.freezing.comparison import ReferenceComparison
from lightning_egeria.freezing.decide import Decider
from lightning_egeria.freezing.reference import ReferenceModel
from lightning_egeria.freezing.runner import ReferenceRunner


class HeldPool(ReferenceRunner):
    """Keeps the answers back until the test lets them go."""

    def __init__(self, chain, samples=64):
        super().__init__(
            functools.partial(ReferenceModel, chain, samples, "float32"),
            chain.entries,
            background=False,
            timeout_s=60,
        )
        self.waiting, self.busy, self.fails, self.in_thread = [], False, None, False

    def ready(self):
        return not self.busy

    def move_to_thread(self, module):
        super().move_to_thread(module)
        self.busy, self.in_thread = False, True

    def submit(self, evaluation, weights=None):
        if self.in_thread:
            return super().submit(evaluation, weights)
        held = Future()
        self.waiting.append((held, super().submit(evaluation, weights)))
        return held

    def answer(self):
        for held, future in self.waiting:
            if self.fails is not None:
                held.set_exception(self.fails)
            else:
                held.set_result(future.result())
        self.waiting = []


class Asked:
    """Answers with prepared decisions; remembers what it was told."""

    wants_reference, held, refresh = True, False, 1

    def __init__(self, decisions=()):
        self.decisions = dict(decisions)
        self.told, self.evaluations = [], 0

    @property
    def holds_reference(self):
        return self.held or self.evaluations % self.refresh > 0

    def start(self, max_depth):
        pass

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        self.told.append((step, plasticity, learning_rate, loss))
        self.evaluations += loss is not None
        return self.decisions.get(step)

    def plasticity(self):
        return {step: plasticity for step, plasticity, _, _ in self.told if plasticity is not None}


class Told:
    """Notices that the test reads."""

    def __init__(self):
        self.lines, self.warnings = [], []

    def inform(self, text):
        self.lines.append(text)

    def warn(self, text, once=None):
        self.warnings.append(text)


class Run:
    """A few training steps around a decider."""

    def __init__(self, policy, batch_size=8, every=2, refresh=10, wait_s=0.0, adapt=False, may_move=False):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        chain = LayerChain.trace(self.net, lambda: self.net(torch.ones(2, 4)).sum())
        self.pool, self.policy, self.batch_size = HeldPool(chain), policy, batch_size
        self.freezer, self.told, self.step = Freezer(self.net, chain), Told(), 0
        policy.refresh = refresh
        self.comparison = ReferenceComparison(
            self.freezer,
            policy,
            self.pool,
            every,
            64,
            wait_s=wait_s,
            adapt=adapt,
            may_move=may_move,
            notices=self.told,
        )
        self.decider = Decider(self.freezer, policy, self.comparison)
        self.observers = Observers(self.freezer, self.comparison)
        self.evaluations = self.comparison.evaluations
        self.comparison.refresh_reference()
        self.events = self.freezer.events

    def steps(self, count, answers=True, batch_size=None):
        for _ in range(count):
            self.observers.batch_start(None, self.step)
            loss = self.net(torch.randn(batch_size or self.batch_size, 4)).square().mean()
            self.observers.forward_end(loss)
            self.optimizer.zero_grad()
            loss.backward()
            self.observers.backward_end()
            self.optimizer.step()
            self.step += 1
            self.observers.batch_end()
            self.freezer.step = self.step
            decision = self.decider.decide(self.step, learning_rate=0.1)
            if decision is not None:
                self.freezer.freeze_to(decision.depth, decision.reason)
            self.observers.optimizer_step(self.step)
            if answers:
                self.pool.answer()
        return self
