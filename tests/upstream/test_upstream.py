"""Each private name of torch, Lightning, Rich and TQDM, used as the package uses it, with the installed versions."""

import ast
import io
import re
import types

import lightning as L
import pytest
import rich
import torch
import torch.distributed as dist
import tqdm
from lightning.pytorch.loops.fit_loop import _FitLoop
from rich.progress import Progress
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.upstream import checks, ddp, lightning, needs, terminal
from lightning_egeria.upstream import torch as of_torch
from support.leftovers import REPOSITORY
from support.models import Classifier, fit
from support.ranks import all_well, in_ranks
from support.user_programs import Blocks, run, scripted, vectors


class TestTorch:
    def test_views_have_a_base(self):
        whole = torch.ones(4)
        assert of_torch.base_of(whole[:2]) is whole
        assert of_torch.base_of(whole) is None

    def test_parameters_and_hooks(self):
        layer = nn.Linear(2, 2)
        assert of_torch.own_parameter(layer, "weight") is layer.weight
        assert of_torch.own_parameter(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "weight") is None
        assert not of_torch.has_hooks(layer)
        for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
            handle = register(lambda *_: None)
            assert of_torch.has_hooks(layer)
            handle.remove()

    def test_compiled_modules_are_known(self):
        layer = nn.Linear(2, 2)
        whole = torch.compile(nn.Linear(2, 2), backend="eager")
        itself, method = nn.Linear(2, 2), nn.Linear(2, 2)
        itself.compile(backend="eager")
        method.forward = torch.compile(method.forward, backend="eager")
        assert of_torch.has_dynamo()
        assert [of_torch.is_compiled_itself(one) for one in (layer, whole, itself, method)] == [False, True, True, True]
        assert not of_torch.is_compiled_module(Classifier())

    def test_a_tensor_of_another_class_is_not_asked(self):
        class Loud(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                raise AssertionError

        assert not of_torch.needs_gradient(torch.ones(2).as_subclass(Loud))
        assert of_torch.needs_gradient(torch.ones(2, requires_grad=True))

    def test_a_lightning_module_notes_that_it_is_compiled(self):
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        module = Classifier()
        module._compiler_ctx = {"compiler": "dynamo"}
        assert of_torch.is_compiled_module(module)
        assert trainer.model is None

    def test_nodes_of_the_graph(self):
        x = torch.ones(2, requires_grad=True)
        again, once = checkpoint(torch.sin, x, use_reentrant=True), checkpoint(torch.sin, x, use_reentrant=False)
        assert of_torch.is_reentrant_checkpoint(again.grad_fn)
        assert not of_torch.is_reentrant_checkpoint(once.grad_fn)
        with torch.autocast("cpu", torch.bfloat16):
            product = nn.Linear(2, 2)(x)
        casts = [node for node, _ in product.grad_fn.next_functions if node is not None and of_torch.is_cast(node)]
        assert casts or any(
            of_torch.is_cast(n) for node, _ in product.grad_fn.next_functions for n, _ in node.next_functions
        )

    def test_fsdp_units_are_known(self):
        assert of_torch.is_fsdp_unit(torch.distributed.fsdp.FSDPModule)
        assert not of_torch.is_fsdp_unit(nn.Linear)
        assert all_well(in_ranks(1, names_of_a_sharded_module)) == [True]

    def test_integers_are_multiplied_and_convolved(self):
        weight, scales, zeros = (
            torch.full((3, 4), 2, dtype=torch.int8),
            torch.ones(3),
            torch.zeros(3, dtype=torch.int32),
        )
        x = torch.full((5, 4), 3, dtype=torch.uint8)
        given = (x, 0.5, 1, of_torch.qlinear_prepack(weight), scales, zeros, None)
        assert torch.equal(of_torch.qlinear(*given), torch.full((5, 3), 8.0))
        weight, geometry = torch.full((3, 2, 1, 1), 2, dtype=torch.int8), ([1, 1], [0, 0], [1, 1], 1)
        image = torch.full((1, 2, 4, 4), 3, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
        packed = of_torch.qconv_prepack(weight, scales, geometry)
        assert torch.equal(
            of_torch.qconv(image, 0.5, 1, packed, scales, zeros, None, geometry), torch.full((1, 3, 4, 4), 4.0)
        )

    def test_the_others(self):
        assert of_torch.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]
        assert all(
            isinstance(kind(2), of_torch.BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
        )
        seen = []

        class Mode(of_torch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with Mode():
            torch.ones(2) + 1
        assert torch.ops.aten.add.Tensor in seen


def names_of_a_sharded_module():
    dist.init_process_group("gloo", rank=0, world_size=1)
    module = nn.Linear(2, 2)
    torch.distributed.fsdp.fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    left = vars(module).keys() - of_torch.without_fsdp_state(vars(module)).keys()
    return len(left) > 0 and any(map(of_torch.is_fsdp_unit, type(module).__mro__))


def wrapped_by_hand():
    dist.init_process_group("gloo", rank=0, world_size=1)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with ddp.ignoring(module, ["1.running_mean"]):
        wrapped = DistributedDataParallel(module)
    assert "_ddp_params_and_buffers_to_ignore" not in vars(module)
    assert "1.running_mean" in wrapped.parameters_to_ignore
    assert (ddp.hooks_of(wrapped), ddp.builtin_hook_of(wrapped)) == ([], None)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ddp.hooks_of(wrapped) == [(default_hooks.allreduce_hook, None)]
    ddp.end_exchange(wrapped)
    other = DistributedDataParallel(nn.Linear(2, 2))
    kind = dist.BuiltinCommHookType.FP16_COMPRESS
    ddp.register_builtin_hook(other, kind)
    return ddp.builtin_hook_of(other) == kind


class Settings(L.Callback):
    """What Lightning's strategy has."""

    def on_train_start(self, trainer, module):
        strategy = trainer.strategy
        assert ddp.missing(strategy) == []
        assert "find_unused_parameters" not in ddp.settings_of(strategy)
        with ddp.with_settings(strategy, find_unused_parameters=True):
            strategy.model = module
            wrapped = ddp.wrap(strategy, module)
        assert wrapped.find_unused_parameters
        assert "find_unused_parameters" not in ddp.settings_of(strategy)
        assert not ddp.averages_models(strategy)
        strategy.model = wrapped
        self.ran = True


def under_ddp():
    callback = Settings()
    run(Blocks(), callback, epochs=1, strategy="ddp", data=vectors())
    return callback.ran


class TestDDP:
    def test_hooks_and_ignored_buffers(self):
        assert all_well(in_ranks(1, wrapped_by_hand)) == [True]

    def test_the_strategy(self):
        assert all_well(in_ranks(1, under_ddp)) == [True]

    def test_others_need_nothing(self):
        assert ddp.missing(types.SimpleNamespace()) == []

    def test_a_renamed_attribute_is_missed(self):
        assert needs.unmentioned(DistributedDataParallel, ["_comm_hooks", "_no_such"]) == [
            "DistributedDataParallel._no_such"
        ]


class Looks(L.Callback):
    """Uses each private name of Lightning in a run."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        fetcher = lightning.data_fetcher(trainer)
        lightning.set_data_fetcher(trainer, fetcher)
        assert fetcher.fetched >= 1
        assert lightning.combined_loader(trainer).flattened
        source = lightning.data_source(trainer)
        lightning.set_data_source(trainer, source)
        assert source.is_defined()
        assert lightning.loaders_keep_their_place(trainer) is False
        assert lightning.only_recomputes_statistics(trainer) is False
        assert lightning.is_accumulating(trainer) is (batch_idx % 2 == 0 and batch_idx < 4)
        loader = lightning.prepared(trainer, vectors())
        assert loader.batch_size == 8
        assert lightning.missing(trainer) == []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            before = lightning.logging_step(trainer)
            lightning.count_logging_step(trainer)
            assert lightning.logging_step(trainer) == before + 1

    def on_train_start(self, trainer, module):
        datamodule = L.LightningDataModule()
        lightning.set_logs_hyperparameters(datamodule, False)
        assert lightning.logs_hyperparameters(datamodule) is False
        selector = trainer._data_connector._datahook_selector
        before = selector.datamodule
        lightning.let_hooks_belong_to(trainer, datamodule)
        assert selector.datamodule is datamodule
        lightning.let_hooks_belong_to(trainer, before)
        lightning.let_batches_go_to(trainer, datamodule)
        assert trainer._data_connector._datahook_selector.get_instance("transfer_batch_to_device") is datamodule
        trainer._data_connector._datahook_selector = selector
        name = "on_before_batch_transfer"
        assert lightning.chosen_hook(module, datamodule, name) == getattr(module, name)


class Asked(torch.utils.data.DataLoader):
    """Notes who asks for its iterator."""

    by_loop = False

    def __iter__(self):
        type(self).by_loop |= lightning.is_asked_by_loop()
        return super().__iter__()


class TestLightning:
    def test_a_run_has_all_of_them(self):
        run(Blocks(), Looks(), data=vectors(40), accumulate_grad_batches=2)

    def test_a_loop_that_asks_is_known(self):
        data = Asked(vectors().dataset, 8)
        next(iter(data))
        assert not Asked.by_loop
        run(Blocks(), data=data, epochs=1)
        assert Asked.by_loop

    def test_a_compiled_module_has_its_note(self):
        assert needs.lacking(Classifier(), ["_compiler_ctx"]) == []


class TestTerminal:
    def test_tqdm_leaves_the_line(self):
        stream = io.StringIO()
        with tqdm.tqdm(total=2, file=stream, disable=False), terminal.above_tqdm():
            stream.write("a line\n")
        assert "a line" in stream.getvalue()
        assert not list(tqdm.tqdm._instances)
        with terminal.above_tqdm():
            pass

    def test_rich_draws_nothing_meanwhile(self):
        with Progress(console=rich.get_console(), auto_refresh=False) as progress, terminal.rich_at_rest():
            assert progress.live._lock._is_owned()
        with terminal.rich_at_rest():
            pass


class TestCheck:
    def test_a_renamed_name_fails_before_the_first_step(self, monkeypatch):
        """As if torch had renamed it; DDP is not even used."""
        monkeypatch.setattr(checks.of_torch, "_MODULE", ("_parameters", "_no_such_hooks"))
        module = Classifier()
        text = rf"torch {re.escape(torch.__version__)} with Lightning 2\.\S+ lacks Module\._no_such_hooks, which"
        with pytest.raises(UnsupportedError, match=text):
            fit(module, scripted({2: 1}))
        assert module.losses == []

    def test_so_does_one_of_lightning(self, monkeypatch):
        monkeypatch.delattr(_FitLoop, "_skip_backward")
        module = Classifier()
        with pytest.raises(UnsupportedError, match=r"lacks _FitLoop\._skip_backward"):
            fit(module, scripted({2: 1}))
        assert module.losses == []

    def test_the_installed_versions_pass(self):
        said = run(Blocks(), scripted({2: 1}), epochs=1)
        assert said == []
        assert of_torch.missing() == terminal.missing() == []

    def test_a_cast_with_another_name_is_missed(self, monkeypatch):
        monkeypatch.setattr(of_torch, "is_cast", lambda node: False)
        assert of_torch.missing() == ["the autograd node ToCopyBackward0"]


# These have all of them in `upstream`, the others not yet.
ROOMS = ("freezing", "core/distributed", "core/network", "core/training", "methods/partial", "report", "jobs")
OF_PYTHON = {"_getframe"}


def private(tree):
    """The private names that a file reads, imports, and makes."""
    read, made = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (made if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls") else read).add(
                node.attr
            )
        elif isinstance(node, ast.FunctionDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith(("lightning_egeria", "__")):
            read.update(one.name for one in node.names)
            read.update(node.module.split("."))
    return [{name for name in names if name.startswith("_") and not name.startswith("__")} for names in (read, made)]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("MPS backend out of memory"),
    ],
)
def test_out_of_memory_on_each_device(error):
    assert of_torch.is_out_of_memory(error)


def test_other_errors_may_mention_memory():
    assert not of_torch.is_out_of_memory(ValueError("out of memory"))


def test_no_other_file_has_a_private_name_of_others():
    package = REPOSITORY / "lightning_egeria"
    names = {str(path.relative_to(package)): private(ast.parse(path.read_text())) for path in package.rglob("*.py")}
    own = set().union(*(made for _, made in names.values()))
    for room in ROOMS:
        read = {path: names[path][0] - own - OF_PYTHON for path in names if path.startswith(f"{room}/")}
        assert read
        assert {path: found for path, found in read.items() if found} == {}
