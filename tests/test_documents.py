"""The Python blocks of all documents run as they stand and links lead somewhere."""

import functools
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from docs.tables import class_of, pages
from lightning_egeria.cli.methods import METHODS
from support.ranks import LOCAL, free_port

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CARDS = sorted((ROOT / "lightning_egeria").rglob("README.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *CARDS, *sorted(DOCS.rglob("*.md"))]
ORIGINAL_TRAINER = L.Trainer


OF_HUGGING_FACE = ("datasets", "peft", "transformers")


def needed(block):
    """The packages of Hugging Face that a block imports; `make test-slow` installs them."""
    return [name for name in OF_HUGGING_FACE if re.search(rf"^(from|import) {name}\b", block, re.MULTILINE)]


def blocks(opening):
    pattern = re.compile(rf"^```{opening}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}", marks=[pytest.mark.slow] if needed(block) else [])
        for path in DOCUMENTS
        for number, block in enumerate(pattern.findall(path.read_text()))
    ]


RUN = blocks("python")
SEVERAL_PROCESSES = blocks(r"\{code-block\} python")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        outputs = self.head(self.encoder(batch[0]))
        return nn.functional.mse_loss(outputs, torch.zeros_like(outputs))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)


def small_trainer(*args, **kwargs):
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    kwargs = {**quiet, "enable_model_summary": False, "limit_val_batches": 1, **kwargs}
    if any(isinstance(callback, pl_callbacks.ModelCheckpoint) for callback in kwargs.get("callbacks", ())):
        kwargs["enable_checkpointing"] = True
    limits = {"max_epochs": min(3, kwargs.get("max_epochs", 2)), "limit_train_batches": 4}
    return ORIGINAL_TRAINER(*args, **{**kwargs, **limits})


def small_model(create_model, name, **kwargs):
    """Whatever the network, timm's small one for tests, without a download."""
    return create_model("test_resnet", **{**kwargs, "pretrained": False})


def small_of_hugging_face(monkeypatch):
    """Whatever the name, small networks with random weights and small data, without a download."""
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Wide enough that running them takes longer than reading what they computed.
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 512}
    sizes_of_texts = {"vocab_size": 90, "num_hidden_layers": 12, **sizes}
    images = transformers.Dinov2Config(image_size=32, patch_size=8, num_hidden_layers=4, **sizes)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "good", "bad", "film"])}
    splitting = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    splitting.pre_tokenizer = pre_tokenizers.Whitespace()
    data = {
        "imdb": {"text": ["good film", "a bad film"] * 32, "label": [1, 0] * 32},
        "beans": {"image": [Image.new("RGB", (40, 40), (one, 0, 0)) for one in range(64)], "label": [0, 1] * 32},
    }

    def replace(owner, name, function):
        monkeypatch.setattr(owner, name, staticmethod(function))

    def network(name):
        return transformers.AutoModel.from_config(
            images if "dino" in name else transformers.BertConfig(**sizes_of_texts)
        )

    def classifier(_, num_labels):
        config = transformers.BertConfig(num_labels=num_labels, **sizes_of_texts)
        return transformers.BertForSequenceClassification(config)

    def tokenizer(_):
        tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=splitting, **tokens)

    replace(transformers.AutoModel, "from_pretrained", network)
    replace(transformers.AutoModelForSequenceClassification, "from_pretrained", classifier)
    replace(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_dict(data[name]))
    datasets.disable_progress_bars()


def test_nearly_all_blocks_run():
    assert len(RUN) >= 15
    assert len(SEVERAL_PROCESSES) == 3


@pytest.mark.filterwarnings("ignore:.*SWA")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # the snippet resumes in one process
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint")  # at the first start
@pytest.mark.filterwarnings("ignore:freezing. nothing froze")  # two epochs are too short for what they schedule
@pytest.mark.filterwarnings("ignore:cache. the cache of .* does not pay")  # the networks are tiny
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # as the page on frozen backbones advises
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks transformers
@pytest.mark.parametrize("block", RUN)
def test_block_runs(block, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(L, "Trainer", small_trainer)
    monkeypatch.setattr(timm, "create_model", functools.partial(small_model, timm.create_model))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    if needed(block):
        small_of_hugging_face(monkeypatch)
    names = {"model": Module(), "datamodule": Data()}
    exec(compile(block, "block", "exec"), names)
    if "class" in block and "cached" in names:  # an example of a frozen part
        stats = names["cached"].stats
        assert stats.hits + stats.advanced > 0  # times decide which of several values are kept


@pytest.mark.slow
@pytest.mark.parametrize("block", SEVERAL_PROCESSES)
def test_block_runs_on_two_processes(block, tmp_path):
    script = tmp_path / "script.py"
    steps = 8 if "GraphPipeline" in block else 4  # whose processes share each batch
    script.write_text(
        "import functools\nimport lightning as L\nimport torch\nfrom torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        f"{inspect.getsource(Module)}\n{inspect.getsource(Data)}\n"
        "L.Trainer = functools.partial(L.Trainer, accelerator='cpu', max_epochs=2, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        f"model, datamodule = Module(), Data()\n{block}\n"
        f"assert trainer.world_size == 2 and trainer.state.finished and trainer.global_step == {steps}\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PL_"))}
    environment = {**inherited, **LOCAL, "PYTHONPATH": str(ROOT), "MASTER_PORT": free_port()}
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120}
    run = subprocess.run([sys.executable, script], **options)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_quickstart_freezes_a_layer(monkeypatch, tmp_path):
    script, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    with pytest.warns():  # what Lightning advises a newcomer
        exec(compile(script, "first.py", "exec"), names)
    assert names["freezing"].frozen_depth > 0
    assert names["trainer"].callback_metrics["val/acc"] > 0.9


def test_each_card_has_a_page():
    assert all(page.exists() and page.read_text() == content for page, content in pages().items()), (
        "run: python -m docs.tables"
    )
    included = {
        (page.parent / target).resolve()
        for page in (DOCS / "cards").glob("*.md")
        for target in re.findall(r"^```\{include\} (\S+)$", page.read_text(), re.MULTILINE)
    }
    assert included == {*CARDS}


def test_the_table_to_choose_from_names_each_method():
    text = (DOCS / "methods.md").read_text().partition("## Which methods run together")[0]
    for method in METHODS.values():
        kind = class_of(method).__name__
        assert f"`{kind.removesuffix('Strategy')}`" in text, f"docs/methods.md: no row says when to use {kind}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document):
    links = re.findall(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]*)?\)", document.read_text())
    for target, anchor in links:
        file = (document.parent / target).resolve() if target else document
        assert file.exists() or (DOCS / target).exists(), target
        if anchor and file.suffix == ".md":
            included = re.findall(r"```\{include\} (\S+)\n", file.read_text())
            text = "\n".join([file.read_text(), *((file.parent / name).read_text() for name in included)])
            assert anchor[1:] in {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}, anchor


def slug(heading):
    """Of a heading, as in links to it.

    >>> slug("What it saves, and where")
    'what-it-saves-and-where'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
