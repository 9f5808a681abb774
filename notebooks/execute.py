"""Executes the notebooks and stores their outputs, so that a code host shows them: `make notebooks`."""

import argparse
import base64
import hashlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT_S = 600  # of a cell
# Hosts show warnings of any library, with the paths of the machine. Ours are what the texts are about.
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
OURS = re.compile(r"(?:.*?: )?((?:freezing|cache|tuning): .*|step \d+: .*)")

# What each notebook says happens, checked when it is executed.
PROMISES = {
    "1_quickstart": """
assert freezing.frozen_depth >= 1, freezing.savings()
assert ours.metrics[-1].values["val/acc"] > 0.95
""",
    "2_frozen_prefix_cache": """
assert stats.hits >= 2.9 * 320 and stats.not_loaded > 0, stats
assert plain.losses == cached.losses
assert cached.seconds[1] < cached.seconds[0] / 10, cached.seconds
assert views.stats.hits > 0, views.stats
""",
    "3_reading_plasticity": """
assert len(watched.evaluations) > 50 and not watched.events
assert any(event.kind == "freeze" for event in converged.events), converged.events
assert all(event.kind == "freeze" or "learning rate" in event.reason for event in converged.events)
""",
    "4_fine_tuning": """
assert trials[float("inf")].frozen_depth >= trials[0].frozen_depth, frontier.losses
assert frontier.losses, trials[0].events
assert freezing.frozen_depth >= 1, freezing.events
assert data.stats.hits > 0, data.stats
""",
    "5_several_processes": """
assert exchanged == [sum(sizes[depth:]) for depth in depths]
assert in_front == [[0, 0, 3] + [0, 3] * 4 + [0], [0, 3, 0] + [3, 0] * 4 + [3]], in_front
""",
    "6_selective_backprop": """
assert selection.trained < 0.65 * selection.seen, selection
assert selection.scored == selection.seen * 5 / 6, selection
assert all(accuracy > 0.9 for runs in found.values() for *_, accuracy in runs), found
kept = [fmean(accuracy for *_, accuracy in found[name]) for name in ("plain", "selective", "plain, shorter")]
assert max(kept) - min(kept) < 0.03, kept  # no gain, and no great loss
""",
    "7_branch_tuning": """
assert tuned > plain + 0.05, (tuned, plain)
assert tuned >= grid[best] - 0.02, (tuned, grid)
assert cost < 2.5 < len(grid), cost
""",
    "8_adaptive_batch_size": """
assert adaptive.changes and adaptive.changes[-1].batch_size > INITIAL, adaptive.changes
assert accuracies["adaptive"] > accuracies["fixed at 16"] - 0.03, accuracies
assert steps < small_steps, (steps, small_steps)
""",
    "9_cluster": """
assert all(len(record.completion_times) == len(workload) for record in records.values())
assert averages["pollux"] < averages["tiresias"] < averages["fcfs"], averages
assert averages["backfill"] < averages["fcfs"], averages
""",
}


def digest(notebook: nbformat.NotebookNode) -> str:
    """Of the sources of all cells: outputs belong to these."""
    sources = [[cell.cell_type, cell.source] for cell in notebook.cells]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs.

    Args:
        path: of the notebook.
        folder: empty directory to run in.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, or the notebook does not do what it promises.
    """
    notebook = nbformat.read(path, 4)
    work, temporary = folder / "work", folder / "tmp"
    work.mkdir()
    temporary.mkdir()
    variables = {
        "PYTHONPATH": str(FOLDER.parent),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(temporary),
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        notebook.cells.append(nbformat.v4.new_code_cell(PROMISES[path.stem]))
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources, record_timing=False).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    del notebook.cells[-1]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _tidied(cell.outputs, folder)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "lightning_egeria": {"sources": digest(notebook)},
    }
    return notebook


def _tidied(outputs: list[nbformat.NotebookNode], folder: Path) -> list[nbformat.NotebookNode]:
    """The outputs without what other libraries say, and without the machine's folders."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            output.data, output.metadata = {"image/png": _small(data["image/png"])}, {}
            kept.append(output)
            continue
        text = output.get("text") or COLOURS.sub("", data["text/plain"])
        if output.get("name") == "stderr":
            text = "".join(f"{found[1]}\n" for line in text.splitlines() if (found := OURS.fullmatch(line)))
        text = text.replace(str(folder), "FOLDER")
        if output.output_type == "execute_result":
            output.data = {"text/plain": text}
            kept.append(output)
        elif text and kept and kept[-1].output_type == "stream":
            kept[-1].text += text
        elif text:
            kept.append(nbformat.v4.new_output("stream", text=text))
    return kept


def _small(png: str) -> str:
    """The picture with 48 colours, in base64."""
    picture, small = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), io.BytesIO()
    picture.quantize(48).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    """Execute all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path.resolve(), Path(folder)), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
