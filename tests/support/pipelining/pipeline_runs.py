"""What ranks of a graph pipeline do in tests."""

import copy
import dataclasses
import os
import random
import time
import warnings
import weakref
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lightning_egeria.errors import PipelineError, PlanError
from lightning_egeria.methods.pipelining.costs import measured_graph
from lightning_egeria.methods.pipelining.pipeline import GraphPipeline
from lightning_egeria.methods.pipelining.plan import Plan
from lightning_egeria.methods.pipelining.planner import Limits, plan_graph
from lightning_egeria.methods.pipelining.splitting import split
from lightning_egeria.methods.pipelining.timeline import Timeline
from support.pipelining.graphs import random_graph, series_parallel


class Branches(nn.Module):
    """Nested branches, a skip over one, a tied embedding, a weight between modules, and several outputs."""

    factor = 1.0

    def __init__(self, dropout=0.0, norm=True):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.inner = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.right = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Linear(8, 8)
        self.head = nn.Linear(16, 3)
        self.words = nn.Linear(8, 12, bias=False)
        self.words.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, batch):
        tokens, _ = batch
        x = self.embed(tokens) * self.scale * self.factor
        left = self.left(x) + x
        right = self.right(self.inner[0](x).tanh() + self.inner[1](x * self.scale)) + x
        return self.head(torch.cat([self.norm(left), right], dim=1)), self.words(right)


FOUR = {
    "embed": ["embed"],
    "left": ["left", "norm"],
    "right": ["inner.0", "inner.1", "right"],
    "end": ["head", "words"],
}
MOVED = {**FOUR, "left": ["left"], "end": ["norm", "head", "words"]}
SIX = {
    "embed": ["embed"],
    "left": ["left"],
    "inner": ["inner.0"],
    "other": ["inner.1"],
    "right": ["right"],
    "end": ["norm", "head", "words"],
}


def loss_fn(output, batch):
    classes, words = output
    return nn.functional.cross_entropy(classes, batch[1]) + nn.functional.cross_entropy(words, batch[0])


def data(samples=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, (samples,), generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def start(size):
    if size > 1:
        rank = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)


def freeze_front(*models):
    for one in models:
        one.embed.requires_grad_(False)
        one.left.requires_grad_(False)
        one.scale.requires_grad_(False)


def plain_step(model, batch, micro_batches):
    loss = 0.0
    for part, share in split(batch, micro_batches):
        part_loss = loss_fn(model(part), part) * share
        part_loss.backward()
        loss += float(part_loss.detach())
    return loss


def train_beside_one_process(stages, steps, limits=None, plan=None, micro_batches=4):
    """Trains with a pipeline and with plain torch; checks losses, gradients and weights; returns the plan."""
    # In float32, Adam turns the rounding of gradients that are 0, such as of biases in front of a norm, into steps.
    model = Branches(norm=plan is None).double()
    plain = copy.deepcopy(model)
    pipeline = GraphPipeline(model, data(), micro_batches=micro_batches, stages=stages, limits=limits, plan=plan)
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01) for one in (model, plain)]
    for step in range(steps):
        if step == 2:  # the front freezes
            freeze_front(model, plain)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = data(10 if step % 3 else 9, step)  # another size, which does not divide
        loss = pipeline.step(batch, loss_fn)
        assert abs(float(loss) - plain_step(plain, batch, micro_batches)) < 1e-9
        expected = dict(plain.named_parameters())
        stage, _ = pipeline.plan.place(dist.get_rank() if dist.is_initialized() else 0)
        owned = 0
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                owned += 1
                torch.testing.assert_close(
                    parameter.grad, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}"
                )
        assert owned or not pipeline.plan.learns[stage]
        if pipeline.plan.learns[stage]:
            (in_flight,) = Timeline((tuple(pipeline.spans),)).in_flight
            assert in_flight <= pipeline.plan.in_flight_of_a_device(stage)
        for optimizer in optimizers:
            optimizer.step()
    pipeline.gather()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    return pipeline.plan


def message_of(function, *arguments):
    try:
        function(*arguments)
    except PipelineError as error:
        return str(error)
    return "nothing was raised"


def many_checks(stages, size):
    """All that one start of the ranks can show."""
    start(size)
    rank = dist.get_rank()
    found = {"plan": train_beside_one_process(stages, 5)}
    for name, homes in (("dropout", stages), ("moved", MOVED)):
        torch.manual_seed(1)
        model = Branches(dropout=0.5)
        pipeline = GraphPipeline(model, data(), micro_batches=3, stages=homes)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for seed in range(3):
            optimizer.zero_grad()
            losses.append(float(pipeline.step(data(seed=seed), loss_fn)))
            optimizer.step()
        pipeline.gather()
        found[name] = [*losses, *model.norm.running_mean.tolist()]

    def fails(output, batch):
        raise ValueError("the labels are wrong")

    found["failure"] = message_of(pipeline.step, data(), fails)
    if rank == 1:
        model.left.forward = lambda x: 1 / 0
        model.inner[0].forward = lambda x: 1 / 0
    found["broken"] = message_of(pipeline.step, data(), loss_fn)
    found["new shape"] = message_of(pipeline.step, data(8), loss_fn)
    assert message_of(pipeline.step, data(8), loss_fn) == found["new shape"]  # and again: nobody knows it yet
    found["batches"] = message_of(pipeline.step, data(seed=rank), loss_fn)
    found["state dict"] = message_of(model.state_dict)
    found["module"] = message_of(model.left if rank != 1 else model.right, torch.ones(2, 8))
    check_memory_and_replan(stages)
    check_idle_processes()
    check_autocast(stages)
    return found


def own_bytes(model):
    """Bytes of distinct storages of weights and gradients."""
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


class Kept:
    """The most bytes that autograd keeps at once."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        held = Held(tensor)
        self.now += tensor.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(held, self.free, tensor.nbytes)
        return held

    def free(self, size):
        self.now -= size


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def check_memory_and_replan(stages):
    """Other seeds on each rank, other numbers between modules, recomputation, and a plan after a freeze."""
    rank, kept, found = dist.get_rank(), {}, {}
    for recompute in (False, True):
        torch.manual_seed(rank)  # rank 0's weights count
        model = Branches(dropout=0.3).double()
        torch.manual_seed(0)
        plain = Branches(dropout=0.3).double()
        pipeline = GraphPipeline(model, data(), micro_batches=4, stages=stages, recompute=recompute)
        counted = Kept()
        with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda held: held.tensor):
            pipeline.step(data(), loss_fn)
        kept[recompute] = counted.most
        found[recompute] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if rank == 1:
            found[recompute]["running_mean"] = model.norm.running_mean.clone()
        modules = pipeline.plan.stages[rank].name
        owned = sum(p.nbytes for name, p in model.named_parameters() if name.startswith(tuple(FOUR[modules])))
        owned += model.scale.nbytes + (rank == 3) * model.embed.weight.nbytes  # read between modules; tied
        assert own_bytes(model) <= 2 * owned + 8 * len(list(model.parameters()))
        model.left.eval()
        plain.left.eval()
        model.factor = plain.factor = 3.0  # read between modules
        model.zero_grad()
        assert abs(float(pipeline.step(data(), loss_fn)) - plain_step(plain, data(), 4)) < 1e-9
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert abs(pipeline.clip_gradient_norm(0.01) - float(norm)) < 1e-9
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, expected[name].grad)
    assert found[False].keys() == found[True].keys()
    for name, value in found[False].items():
        assert torch.equal(value, found[True][name]), name
    assert kept[True] < kept[False] or rank in (0, 3), kept  # the first keeps next to nothing, the last has the loss
    check_new_plan()


def same_costs(traced, model, batch):
    """As `measured_graph`, with costs that do not depend on what else the machine does."""
    graph, groups = measured_graph(traced, model, batch)
    nodes = tuple(dataclasses.replace(node, forward_s=1.0, backward_s=2.0) for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes), groups


def for_two(graph, limits):
    """A plan that leaves processes without work."""
    return plan_graph(graph, dataclasses.replace(limits, devices=2))


def check_idle_processes():
    """A plan for two of four processes trains as any other, and its batches may be smaller than a stage is wide."""
    model, plain = (Branches(norm=False).double() for _ in range(2))
    with (
        mock.patch("lightning_egeria.methods.pipelining.pipeline.plan_graph", for_two),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        pipeline = GraphPipeline(model, data(), micro_batches=4)
    assert pipeline.plan.devices == 2
    idle = dist.get_rank() >= 2
    found = [str(one.message) for one in told if "fastest plan" in str(one.message)]
    assert len(found) == (dist.get_rank() == 0)
    assert all("needs 2 of 4 processes; the others compute nothing. Start fewer" in text for text in found)
    plain.load_state_dict(model.state_dict())
    for samples in (10, 1):
        model.zero_grad()
        plain.zero_grad()
        loss = pipeline.step(data(samples), loss_fn)
        assert abs(float(loss) - plain_step(plain, data(samples), 4)) < 1e-9
        expected = dict(plain.named_parameters())
        owned = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert (not owned) == idle
        for name, gradient in owned.items():
            torch.testing.assert_close(gradient, expected[name].grad)
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert abs(pipeline.clip_gradient_norm(0.01) - float(expected_norm)) < 1e-9
    if idle:
        assert own_bytes(model) <= 8 * len(list(model.parameters()))
    again = GraphPipeline(model_of(pipeline), data(), plan=Plan.from_json(pipeline.plan.to_json()))
    assert again.plan.stages == pipeline.plan.stages


def check_autocast(stages):
    """Forwards run in bfloat16, what is sent too, and backwards outside of autocast, as they should."""
    for recompute in (False, True):
        model = Branches(norm=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline = GraphPipeline(model, data(), micro_batches=4, stages=stages, recompute=recompute)
            plain = copy.deepcopy(model)
            loss = pipeline.step(data(), loss_fn)
        expected = 0.0
        for part, share in split(data(), 4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                part_loss = loss_fn(plain(part), part) * share
            part_loss.backward()
            expected += float(part_loss)
        assert abs(float(loss) - expected) < 1e-5
        for name, parameter in plain.named_parameters():
            own = dict(model.named_parameters())[name].grad
            if own is not None:
                torch.testing.assert_close(own, parameter.grad, rtol=0.02, atol=0.002)
        pipeline.step(data(), loss_fn)  # without autocast, other dtypes are sent


def model_of(pipeline):
    pipeline.gather()
    return pipeline.model


@mock.patch("lightning_egeria.methods.pipelining.preparation.measured_graph", same_costs)
def check_new_plan():
    model, plain = (Branches(norm=False).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    limits = Limits(4, 4, max_width=1)
    pipeline = GraphPipeline(model, data(), limits=limits)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), 0.01) for one in (model, plain)]
    for step in range(4):
        if step == 2:
            freeze_front(model, plain)
            assert pipeline.is_outdated
            pipeline.replan(optimizers[:1])
            assert not pipeline.is_outdated
        if step == 3:
            stages = pipeline.plan.stages
            with mock.patch("lightning_egeria.methods.pipelining.pipeline.plan_graph", for_two):
                assert pipeline.replan(optimizers[:1]).devices == 2
            assert len(stages) == 4
        for optimizer in optimizers:
            optimizer.zero_grad()
        pipeline.step(data(seed=step), loss_fn)
        plain_step(plain, data(seed=step), 4)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = pipeline.optimizer_state(optimizers[0]), optimizers[1].state_dict()
    if dist.get_rank() == 0:
        assert state["state"].keys() == expected["state"].keys()
        for number, one in expected["state"].items():
            for name, value in one.items():
                torch.testing.assert_close(state["state"][number][name], value)
    pipeline.gather()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def steps(stages, size, count, limits=None, plan=None):
    start(size)
    return train_beside_one_process(stages, count, limits, plan)


def killed(stages, size):
    start(size)
    pipeline = GraphPipeline(Branches(), data(), micro_batches=4, stages=stages)
    pipeline.step(data(), loss_fn)
    if dist.get_rank() == 2:
        os._exit(1)
    started = time.monotonic()
    return message_of(pipeline.step, data(), loss_fn), time.monotonic() - started


class Graph(nn.Module):
    """A linear module for each node of a graph, which reads the sum of those before it."""

    def __init__(self, graph, frozen):
        super().__init__()
        self.parts = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(len(graph.nodes))})
        self.reads = [[first for first, second in graph.edges if second == node] for node in range(len(graph.nodes))]
        for number in frozen:
            self.parts[str(number)].requires_grad_(False)

    def forward(self, batch):
        values = []
        for number, reads in enumerate(self.reads):
            given = sum((values[other] for other in reads), batch)
            values.append(self.parts[str(number)](given).tanh())
        read = {other for reads in self.reads for other in reads}
        return torch.cat([value for number, value in enumerate(values) if number not in read], dim=1)


def random_pipelines(size, seeds):
    """Trains random graphs in random stages."""
    start(size)
    tried = 0
    for seed in seeds:
        generator = random.Random(seed)
        graph = (random_graph if seed % 2 else series_parallel)(seed)
        count = len(graph.nodes)
        frozen = [node for node in range(count) if generator.random() < 0.2]
        if len(frozen) == count:
            continue
        homes = [generator.randrange(size) for _ in range(count)]
        if seed % 3:
            homes.sort()  # else most stages wait for each other in a circle
        stages = {str(place): [f"parts.{n}" for n, home in enumerate(homes) if home == place] for place in range(size)}
        torch.manual_seed(seed)
        model = Graph(graph, frozen).double()
        plain = copy.deepcopy(model)
        micro_batches = generator.randint(1, 6)
        batch = torch.randn(12, 4, dtype=torch.float64)
        try:
            pipeline = GraphPipeline(
                model,
                batch,
                stages={name: paths for name, paths in stages.items() if paths},
                limits=Limits(size, micro_batches, group=generator.choice([1, 2])),
            )
        except PlanError:  # a circle, or a stage without modules
            continue
        tried += 1
        pipeline.step(batch, lambda output, _: output.square().mean())
        for part, share in split(batch, micro_batches):
            loss = plain(part).square().mean() * share
            if loss.requires_grad:
                loss.backward()
        stage, _ = pipeline.plan.place(dist.get_rank())
        for number in range(count):
            if f"parts.{number}" in stages[pipeline.plan.stages[stage].name]:
                pairs = zip(*(net.parts[str(number)].parameters() for net in (model, plain)), strict=True)
                for one, other in pairs:
                    assert (one.grad is None) == (other.grad is None), (seed, number)
                    if one.grad is not None:
                        torch.testing.assert_close(one.grad, other.grad)
    return tried


class Attends(nn.Module):
    """One module returns None beside its output, one is under `torch.no_grad` although it could train."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.target, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, batch):
        x = batch[0]
        with torch.no_grad():
            target = self.target(x)
            size = target.norm(dim=2, keepdim=True) + 1
        found, _ = self.attention(x, x, x, need_weights=False)
        return self.head((found * size + target).mean(1))


def attends(stages):
    """Gradients of a pipeline, of those weights that this rank holds, and those of one process."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(rank=rank, world_size=len(stages))  # with a back end for each kind of device
    torch.manual_seed(0)
    model, generator = Attends(), torch.Generator().manual_seed(0)
    plain = copy.deepcopy(model)
    batch = torch.randn(6, 4, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    nn.functional.cross_entropy(plain(batch), batch[1]).backward()
    pipeline = GraphPipeline(model, batch, micro_batches=2, stages=stages)
    pipeline.step(batch, lambda output, part: nn.functional.cross_entropy(output, part[1]))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients, {name: parameter.grad for name, parameter in plain.named_parameters()}, pipeline.plan.learns
