"""Whatever a file holds: what was written, a miss or the documented error; no other exception, and little memory."""

import io
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz import formats as readers
from fuzz.formats import EXACT, MISS, OTHER, formats
from lightning_egeria import errors
from lightning_egeria.caching.store.directory import CacheDirectory
from lightning_egeria.caching.store.manifest import ENTRIES, INDEX, LOCK, MANIFEST, is_in_use, remove_store
from lightning_egeria.caching.store.samples import decode, encode
from lightning_egeria.caching.store.store import ActivationStore
from lightning_egeria.command import main as egeria
from lightning_egeria.core.snapshots.framing import read_part, write_parts
from lightning_egeria.errors import CheckpointError, RecordError, StoreError
from lightning_egeria.freezing.policy import FreezingPolicy
from lightning_egeria.report import figures
from lightning_egeria.report.record import LARGEST_BYTES, RunRecord
from support.caching.stored import bits

FUZZ = settings(deadline=None)
ERRORS = {"ValueError", "no state"} | {name for name, kind in vars(errors).items() if isinstance(kind, type)}
JOBS = [
    *("description of a job", "settings of a job", "requirements", "run directory", "forged job"),
    *("status of a job", "submission of a job", "results of a job", "hints of a job", "graph", "plan"),
    *("log of a simulation", "workload", "trace", "run that froze", "repository"),
]
NAMES = [
    *JOBS,
    *("manifest.json", "files of a store", "index and entries", "forged entry"),
    *("fields of a sample", "record of a run", "state of a policy"),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**63, 2**64, 10**30, 10**400, 10**1000])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\x1b[2J", "\ud800", "../x", "plain", "tensor", "float64", "qint8", "<U99999", "torch.bool"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return {tested.name: tested for tested in formats(tmp_path_factory.mktemp("formats"))}


def test_all_formats_are_tested(known):
    assert list(known) == NAMES


def read_traced(tested, data):
    """What came of reading, and the bytes that it took at most."""
    tracemalloc.start()
    try:
        return tested.read(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def outcome_of(tested, data):
    """What came of reading; memory stays in proportion to the input."""
    outcome, most = read_traced(tested, data)
    if most >= 10**6 + 100 * len(data):  # the first reading may have imported modules; memory of the input comes again
        outcome, most = read_traced(tested, data)
    assert most < 10**6 + 100 * len(data)
    assert outcome in {EXACT, OTHER, MISS} | ERRORS
    return outcome


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(known, name):
    outcomes = [known[name].read(seed) for seed in known[name].seeds]
    assert outcomes[0] == EXACT
    if name in ("files of a store", "index and entries"):
        # The second half is of another version: of that, nothing may be read.
        half = len(outcomes) // 2
        assert set(outcomes[:half]) == {EXACT}
        assert set(outcomes[half:]) <= {MISS, "StoreError"}
    else:
        assert set(outcomes) == {EXACT}


def campaign(*arguments):
    """Give the readers random inputs, in a process of its own whose memory is limited."""
    command = [sys.executable, "-m", "fuzz.campaign", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory was taken")
@pytest.mark.parametrize(
    "inputs",
    [2000, pytest.param(int(os.environ.get("EGERIA_FUZZ_INPUTS", "1_000_000")), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_random_inputs_are_read_or_refused(inputs):
    """With a message, in bounded time and memory. EGERIA_FUZZ_INPUTS sets how many the slow run gives."""
    told = campaign("--inputs", str(inputs))
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize("name", [name for name in NAMES if name != "repository"])
@FUZZ
@given(data=st.binary(max_size=300))
def test_any_bytes(known, name, data):
    outcome_of(known[name], data)


@st.composite
def damaged(draw, seeds):
    """What was written with some parts cut out, put in, overwritten, or taken from another of the same kind."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.just(start + 1) | st.integers(start, len(data)))
        piece = st.binary(max_size=9) | st.integers(0, 2**64 - 1).map(lambda number: number.to_bytes(8, "little"))
        other = draw(st.sampled_from(seeds))
        data[start:end] = draw(st.just(b"") | piece | st.just(other[start:end]) | st.just(bytes(data[start:end]) * 2))
    return bytes(data)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "repository"])
@FUZZ
@given(data=st.data())
def test_damaged_bytes(known, name, data):
    outcome_of(known[name], data.draw(damaged(known[name].seeds)))


TEXTS = ["forged job", "status of a job", "submission of a job", "results of a job", "hints of a job", "graph", "plan"]
TEXTS += ["run that froze", "manifest.json", "fields of a sample", "record of a run", "state of a policy"]


@pytest.mark.parametrize("name", TEXTS)
@FUZZ
@given(data=st.data())
def test_a_value_replaced(known, name, data):
    """By any other, wherever it stands."""
    tested = known[name]
    seed = data.draw(st.sampled_from(tested.seeds))
    end = 4 + int.from_bytes(seed[:4], "little") if tested.json_from else len(seed)
    whole = [json.loads(seed[tested.json_from : end])]
    container, key = whole, 0
    while data.draw(st.booleans()) or container is whole:
        inside = container[key]
        if not isinstance(inside, (dict, list)) or not inside:
            break
        container, key = (
            inside,
            data.draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside)))),
        )
    if data.draw(st.integers(0, 5)) == 0 and container is not whole:
        del container[key]
    else:
        container[key] = data.draw(JSON)
    text = json.dumps(whole[0]).encode()
    outcome_of(tested, len(text).to_bytes(4, "little") + text + seed[end:] if tested.json_from else text)


# --- what random changes do not find in every run -------------------------------------------------------------------


def described(*leaves, blob=b""):
    head = json.dumps(list(leaves)).encode()
    return len(head).to_bytes(4, "little") + head + blob


@pytest.mark.parametrize(
    "data",
    [
        described(["tensor", [-1, -1], "float32"], blob=bytes(4)),
        described(["tensor", [0, 2**70], "float32"]),
        described(["tensor", [2], "qint8"], blob=bytes(2)),  # printing such a tensor ends the process
        described(["tensor", [2], "bits8"], blob=bytes(2)),
        described(["tensor", [1], "_inductor"], blob=bytes(4)),  # which torch imports when it is asked for it
        described(["tensor", [1], ["float32"]], blob=bytes(4)),
        described(["tensor", [1], "bool"], blob=b"\2"),
        described(["array", [1], "O", False], blob=bytes(8)),
        described(["array", [1], "(1,2", False], blob=bytes(8)),
        described(["array", [1], "a5", False], blob=bytes(5)),
        described(["array", [1], None, False], blob=bytes(8)),
        described(["array", [], "<U1", True], blob=b"\xff\xff\xff\xff"),
        described(["array", [1], "|b1", False], blob=b"\2"),
        described(["array", [1] * 65, "|u1", False], blob=b"\1"),
        described(["absent", [3], [[1], "qint8"], ""]),
        described(["absent", [3], [[1, 1], "float32"], ""]),
        described(["absent", [3], [[-1], "float32"], ""]),
        described(["absent", [2**60], [[1], "float32"], ""]),
        described(["absent", [3], [[1], "float32"], 5]),
        described(["absent", [3], "float32", ""]),
        described(["opaque", 3]),
        described(["plain", {"a": [{}]}]),
        described(["bytes", True], blob=b"\0"),
        described(["plain"]),
        (100_000).to_bytes(4, "little") + b"[" * 100_000,
        (6000).to_bytes(4, "little") + b'[["plain",' + b"9" * 5988 + b"]]",
    ],
)
def test_fields_that_no_sample_has(data):
    tracemalloc.start()
    with pytest.raises(ValueError, match="not the fields of a sample"):
        decode(data)
    assert tracemalloc.get_traced_memory()[1] < 10**6 + 50 * len(data)
    tracemalloc.stop()


@FUZZ
@given(
    st.lists(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.lists(st.integers() | st.floats() | st.booleans())
        | st.lists(st.floats(width=32)).map(torch.tensor)
        | st.lists(st.booleans()).map(torch.tensor)
        | st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), min_size=1).map(np.array)
        | st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda values: np.array(values, np.int64)),
        max_size=4,
    )
)
@example([[float("nan"), 1]])
def test_whatever_is_encoded_comes_back(leaves):
    assert list(map(bits, decode(encode(leaves)))) == list(map(bits, leaves))


@pytest.fixture
def store(tmp_path):
    opened = readers.filled(tmp_path / ("abc0" * 8), 0)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", [MANIFEST, LOCK, ENTRIES, INDEX])
@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_only_files_are_opened(store, tmp_path, name, what):
    store.close()
    (tmp_path / "own").write_bytes((store.folder / name).read_bytes())
    (store.folder / name).unlink()
    if what == "link":
        (store.folder / name).symlink_to(tmp_path / "own")
    elif what == "pipe":
        os.mkfifo(store.folder / name)
    else:
        (store.folder / name).mkdir()
    with pytest.raises(StoreError):
        ActivationStore(store.folder)
    with pytest.raises(StoreError):
        ActivationStore.create(store.folder, store.manifest)
    assert (tmp_path / "own").exists()


def test_a_link_in_the_place_of_a_store_is_not_followed(store, tmp_path):
    directory = CacheDirectory(tmp_path)
    store.close()
    before = {file.name: file.read_bytes() for file in store.folder.iterdir()}
    link = tmp_path / ("def0" * 8)
    link.symlink_to(store.folder)
    described = readers.a_manifest(link)
    with pytest.raises(StoreError, match="it is no folder, or a link to one"):
        directory.open(described, 0, 10**9, 0)
    assert not remove_store(link)
    assert not is_in_use(link)
    assert [summary.folder for summary in directory.summaries()] == [store.folder]
    assert {file.name: file.read_bytes() for file in store.folder.iterdir()} == before


@pytest.mark.parametrize("name", ["../def", "/tmp/def", "", ".", "a b", "abc\n", "\x1b[2J", "äöü"])
def test_a_fingerprint_is_no_path(store, name):
    state = json.loads((store.folder / MANIFEST).read_text()) | {"fingerprint": name}
    (store.folder / MANIFEST).write_text(json.dumps(state))
    with pytest.raises(StoreError):
        ActivationStore(store.folder)


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_store_that_others_may_write_to_is_refused(store, mode):
    store.close()
    store.folder.chmod(mode)
    with pytest.raises(StoreError, match="others may write to it"):
        ActivationStore(store.folder)
    assert not remove_store(store.folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("entries", 2**28 + 1),
        ("activation_bytes", 2**31),
        ("field_bytes", 2**40),
        ("order", [0] * 8),
        ("entries", 10**400),
    ],
)
def test_a_store_larger_than_any_is_refused(store, tmp_path, key, value):
    described = readers.a_manifest(tmp_path / "def")
    state = json.loads(described.to_json()) | {key: value}
    (store.folder / MANIFEST).write_text(json.dumps(state | {"fingerprint": store.folder.name}))
    os.truncate(store.folder / INDEX, 4 * min(state["entries"], 2**28 + 1))  # which takes no room on the disk
    with pytest.raises(StoreError, match=r"more than a store can hold|has an impossible size|is not that of a store"):
        ActivationStore(store.folder)


def test_what_a_manifest_says_is_not_allocated(store):
    state = json.loads((store.folder / MANIFEST).read_text()) | {"field_bytes": 2**29, "activation_bytes": 2**29}
    (store.folder / MANIFEST).write_text(json.dumps(state))
    store.close()
    tracemalloc.start()
    assert CacheDirectory(store.folder.parent).verify(store.folder) == (0, readers.ENTRY_COUNT)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_an_entry_without_a_slot_is_none(store):
    row = readers.row_of(0, 0)
    for number in (-1, readers.ENTRY_COUNT, 10**6):
        assert store.write(number, row, readers.ROW, b"") == 0
        assert store.read(number, store.buffer()) is None
        assert store.read_fields(number) is None
    assert store.write(0, row, (1, 1, 1, 1, 1, *readers.ROW), b"") == 0
    assert (store.folder / INDEX).stat().st_size == 4 * readers.ENTRY_COUNT


def test_a_terminal_is_told_nothing_by_a_file(store, capsys):
    hostile = "\x1b[2J\x07\ud800[/red]"
    state = json.loads((store.folder / MANIFEST).read_text())
    texts = {
        "0a" * 16: state | {"about": {"model": hostile, "boundary": hostile}, "fingerprint": "0a" * 16},
        "0b" * 16: state | {hostile: 1},
        "0c" * 16: state | {"dtype": hostile},
        "0d" * 16: state | {"fingerprint": hostile},
        "0e" * 16: state | {"format": hostile},
        "[red]": state,
        "\x1b[2J": state,
    }
    for name, text in texts.items():
        folder = store.folder.parent / name
        folder.mkdir(mode=0o700)
        for file in store.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / MANIFEST).write_text(json.dumps(text))
    store.folder.parent.chmod(0o700)
    for command, code in (("ls", 0), ("verify", 1), ("prune", 0)):
        assert egeria(["cache", command, str(store.folder.parent)]) == code
        told = capsys.readouterr()
        assert all(letter.isprintable() or letter == "\n" for letter in told.out + told.err)
        told.out.encode()


def test_a_store_that_goes_away_while_it_is_looked_at(store, monkeypatch):
    """Another run makes room for its own."""
    directory = CacheDirectory(store.folder.parent)
    store.close()
    listed = Path.iterdir

    def gone_then(folder):
        if folder == store.folder:
            monkeypatch.setattr(Path, "iterdir", listed)
            assert remove_store(folder)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", gone_then)
    assert directory.summaries() == []


def test_a_record_is_a_file_of_some_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").write_bytes(b"")
    os.truncate(tmp_path / "endless", LARGEST_BYTES + 1)
    for name, reason in (("pipe", "is no ordinary file"), ("endless", f"is larger than {LARGEST_BYTES} bytes")):
        with pytest.raises(RecordError, match=reason):
            RunRecord.read(tmp_path / name)


def test_a_record_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "egeria.json").mkdir()
    with pytest.raises(OSError, match=r"egeria\.json"):
        readers.a_record().write(tmp_path / "egeria.json")
    assert [path.name for path in tmp_path.iterdir()] == ["egeria.json"]


@pytest.mark.parametrize(
    "changed",
    [
        {
            "steps": [
                {
                    "step": 1,
                    "batches": 0,
                    "depth": 0,
                    "data": 0,
                    "forward": 0,
                    "backward": 0,
                    "communication": 0,
                    "rest": 0,
                }
            ]
        },
        {"name": 5},
        {"events": [{"step": 1, "kind": "freeze", "depth": True, "reason": ""}]},
        {"events": [{}]},
        {"metrics": [{"step": 1, "seconds": float("nan"), "values": {}}]},
        {"metrics": [{"step": 1, "seconds": 1, "values": {"loss": float("inf")}}]},
        {"metrics": [{"step": 10**30, "seconds": 1, "values": {}}]},
        {"savings": {"seconds_saved": "much"}},
        {"layer_modules": "abc"},
        {"about": {"a": None}},
    ],
)
def test_a_record_with_what_is_no_number_is_damaged(tmp_path, changed):
    path = tmp_path / "egeria.json"
    readers.a_record().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(RecordError, match="is damaged"):
        RunRecord.read(path)


def test_a_name_that_no_file_can_hold_can_be_drawn_and_written(tmp_path):
    """The folder of a run may have any bytes for its name."""
    record = readers.a_record()
    record.name = "caf\udce9"
    record.write(tmp_path / "egeria.json")
    found = RunRecord.read(tmp_path / "egeria.json")
    assert found.name == "caf?"
    assert figures(found)


@pytest.mark.parametrize("changed", [{"depth": 99}, {"depth": True}, {"depth": -1}, {"at_rest": 1}, {"first": [["x"]]}])
def test_a_policy_says_that_its_checkpoint_is_damaged(changed):
    policy = FreezingPolicy()
    policy.start(3)
    policy.load_state_dict(policy.state_dict() | {"depth": 3})
    for state in (policy.state_dict() | changed, changed, None, []):
        with pytest.raises(CheckpointError, match="the freezing state in the checkpoint is damaged"):
            policy.load_state_dict(state)


# --- between two processes ------------------------------------------------------------------------------------------


@FUZZ
@given(parts=st.lists(st.binary(max_size=50), max_size=3), cut=st.integers(0, 200))
def test_a_message_that_is_cut_off_is_an_end(parts, cut):
    stream = io.BytesIO()
    write_parts(stream, parts)
    whole = stream.getvalue()
    cut = min(cut, len(whole))
    stream, found = io.BytesIO(whole[:cut]), []
    try:
        while True:
            found.append(bytes(read_part(stream)))
    except EOFError:
        pass
    assert found == parts[: len(found)]
    assert (len(found) == len(parts)) == (cut == len(whole)) or not parts
