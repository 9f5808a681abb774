"""The terminal of a user, 80 columns wide, with a progress bar."""

import contextlib
import io
import itertools
import logging
import re
import threading

import lightning as L
import pytest
import rich
import torch
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import RenderHook
from rich.live import Live
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.core.training.notices import log_line
from support.models import trainer_of

WIDTH = 80


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        # The bar takes several lines.
        self.log_dict({f"train/metric_{number}": float(number) for number in range(3)}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def screen(output):
    """The lines that stand on a terminal after ``output``."""
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[\d;?]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", output):
        if code == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif code == "\r":
            column = 0
        elif code.endswith("A"):
            row = max(0, row - int(code[2:-1] or 1))
        elif code.endswith("K"):
            lines[row] = ""
        for letter in text:
            if column == WIDTH:  # it goes on in the next line
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            line = lines[row].ljust(column)
            lines[row] = line[:column] + letter + line[column + 1 :]
            column += 1
    return lines


@contextlib.contextmanager
def terminal():
    """What reaches the terminal: from the bar, the log, and all who print."""
    # No fixture: pytest puts its own streams in place between the set-up and the test.
    output = io.StringIO()
    handler = logging.StreamHandler(output)  # made before the bar, like Lightning's
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", output)
        patch.setattr("sys.stderr", output)
        patch.setattr(rich, "_console", None)  # the one that the bar configures anew
        yield output
    logger.removeHandler(handler)


def test_the_bar_draws_over_nothing():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(48, 8), torch.randint(2, (48,))), batch_size=8)
    with terminal() as output:
        bar = RichProgressBar(console_kwargs={"force_terminal": True, "width": WIDTH, "file": output})
        freezing = KnowledgeGuidedFreezing(ScriptedPolicy({2: 1, 9: 2}), background=False)
        trainer_of(bar, freezing, epochs=2, enable_progress_bar=True).fit(Module(), loader)

    lines = screen(output.getvalue())
    assert all(len(line) <= WIDTH for line in lines)
    text = " ".join(" ".join(lines).split())
    for step, depth, name in ((2, 1, "net.0.0"), (9, 2, "net.1.0")):
        words = f"step {step}: froze {depth} of 3 layer modules, up to '{name}': scheduled for step {step}"
        assert words in text
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert rows[-5:] == ["estimated time saved", "train/loss", *(f"train/metric_{number}" for number in range(3))]


class DrawsBetween(RenderHook):
    """Lets the thread of a bar draw after Rich looked where the bar stands, before it writes."""

    def __init__(self, bar):
        self.threads = []
        self.bar = bar

    def process_renderables(self, renderables):
        if threading.current_thread() not in self.threads:
            self.threads.append(threading.Thread(target=self.bar.refresh))
            self.threads[-1].start()
            self.threads[-1].join(timeout=0.2)
        return renderables


def test_the_thread_of_a_bar_draws_over_no_line():
    heights = itertools.cycle([1, 3])
    with terminal() as output:
        rich.reconfigure(force_terminal=True, width=WIDTH, file=output)
        bar = Live(auto_refresh=False, get_renderable=lambda: "\n".join(["bar"] * next(heights)))
        with bar:
            hook = DrawsBetween(bar)
            rich.get_console().push_render_hook(hook)
            for step in range(3):
                log_line(f"step {step}: froze")
            rich.get_console().pop_render_hook()
    for thread in hook.threads:
        thread.join()
    assert len(hook.threads) == 3
    lines = [line.rstrip() for line in screen(output.getvalue())]
    assert [line for line in lines if line.startswith("step")] == [f"step {step}: froze" for step in range(3)]


def test_a_line_of_the_log_does_not_begin_behind_the_bar_of_tqdm():
    with terminal() as output, tqdm(total=3, file=output, ncols=40) as bar:
        bar.update()
        log_line("step 15: froze")
        bar.update()
    assert "step 15: froze" in [line.rstrip() for line in screen(output.getvalue())]
