"""One module opens the files that others could have written: with limits, without links, for its user."""

import ast

import pytest

from support.leftovers import REPOSITORY

PACKAGE = REPOSITORY / "lightning_egeria"
OWNER = "core/programs/files.py"
METHODS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "symlink_to", "hardlink_to", "savefig"),
    *(
        "fromfile",
        "tofile",
        "memmap",
        "savetxt",
        "loadtxt",
        "genfromtxt",
        "copyfile",
        "copytree",
        "copy2",
        "copyfileobj",
    ),
    *("fdopen", "flock", "lockf", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile"),
    *("connect", "extractall", "unpack_archive", "make_archive", "open_memmap", "link", "symlink", "utime"),
}
NAMES = METHODS | {"open", "load_file", "save_file"}
# By file: the calls that are allowed there, and why.
ALLOWED = {
    "__init__.py": {"Path(__file__).with_suffix('.pyi').read_text": "a file of the package"},
    "caching/entries.py": {"self._directory.open": "a store, by the cache directory"},
    "caching/stream.py": {"self.values.open": "a method of the package"},
    "command.py": {"os.open": "/dev/null"},
    "cluster/command.py": {"figure.savefig": "into memory"},
    "demos/data.py": {
        "Image.open": "data sets that the user names",
        "np.load": "data sets that the user names, without pickle",
    },
    "demos/intents.py": {"gzip.open": "data sets that the user names"},
    "demos/segmentation.py": {
        "Image.open": "data sets that the user names",
        "np.load": "data sets that the user names, without pickle",
    },
    "demos/squad.py": {"gzip.open": "data sets that the user names", "path.open": "data sets that the user names"},
    "demos/translation.py": {
        "gzip.open": "data sets that the user names",
        "(self.root / name).read_text": "data sets that the user names",
    },
    "methods/pipelining/command.py": {"drawn(timelines).savefig": "into memory"},
    "core/programs/processes.py": {
        "(place / 'environ').read_bytes": "of the kernel, about a process",
        "(place / 'cmdline').read_bytes": "of the kernel, about a process",
    },
    "report/command.py": {"figure.savefig": "into memory"},
    "report/drawing.py": {"self.savefig": "into memory"},
    "report/page.py": {"figure.savefig": "into memory"},
    "core/snapshots/tensor_store.py": {
        "self._values.contiguous().view(-1).view(torch.uint8).numpy().tofile": "the same",
        "np.fromfile": "a file that this process has made, without a name",
        "tempfile.TemporaryFile": "a new file without a name",
    },
    "core/snapshots/worker.py": {
        "os.fdopen": "pipes to the process that has started this one",
        "os.open": "/dev/null",
    },
    "caching/store/directory.py": {"os.utime": "the folder of a store, which was looked at"},
    "jobs/execution.py": {"tempfile.TemporaryFile": "a new file without a name"},
    "jobs/environments.py": {"tempfile.TemporaryDirectory": "a new folder for this user alone"},
    "jobs/history.py": {"sqlite3.connect": "a file that the owner has made or looked at, in the home"},
    "jobs/preparing.py": {"shutil.copytree": "the owner copies each file"},
    "jobs/provenance.py": {
        "(ours / name).symlink_to": "in a new folder for this user alone",
        "os.utime": "in a new folder for this user alone",
        "tempfile.TemporaryDirectory": "a new folder for this user alone",
        "tempfile.TemporaryFile": "a new file without a name",
    },
    "jobs/ray_cluster.py": {
        "build_opener(ProxyHandler({})).open": "an address of this machine",
        "tempfile.mkdtemp": "a new folder for this user alone",
    },
    "jobs/rundirs.py": {"os.utime": "a run directory, in the home"},
    "jobs/slurm.py": {"(own / str(place)).symlink_to": "in a new folder of the home"},
}


def opening(tree):
    """The calls of a file that open, make or lock files, as they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = {alias.name for alias in node.names}
            if "fcntl" in {module, *names} or (module in ("os", "shutil", "io", "tempfile") and names & NAMES):
                yield f"import of {module or ', '.join(sorted(names))}"
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        if isinstance(call, ast.Name) and call.id in ("open", "fdopen"):
            yield call.id
        elif isinstance(call, ast.Attribute) and (call.attr in METHODS or ast.unparse(call) in ("np.load", "np.save")):
            owner = ast.unparse(call.value)
            if owner not in ("files", "disk"):
                yield ast.unparse(call)


def test_no_other_module_opens_files():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name != OWNER:
            calls = {*opening(ast.parse(path.read_text()))} - ALLOWED.get(name, {}).keys()
            if calls:
                found[name] = sorted(calls)
    assert found == {}


def test_the_list_has_nothing_that_is_gone():
    for name, calls in ALLOWED.items():
        used = {*opening(ast.parse((PACKAGE / name).read_text()))}
        assert calls.keys() <= used, name
        assert all(calls.values())


@pytest.mark.parametrize(
    "text",
    [
        "open('x')",
        "Path('x').read_text()",
        "path.write_bytes(b'')",
        "path.open('w')",
        "os.open('x', 0)",
        "import fcntl",
        "from os import fdopen",
        "from shutil import copyfile",
        "np.load('x')",
        "figure.savefig('x.png')",
        "tempfile.mkstemp()",
        "with (a / b).open() as c: pass",
        "sqlite3.connect(p)",
    ],
)
def test_a_way_around_is_found(text):
    assert [*opening(ast.parse(text))]


def test_it_needs_no_torch():
    tree = ast.parse((PACKAGE / OWNER).read_text())
    imported = {
        *(alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names),
        *(node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)),
    }
    assert {name.partition(".")[0] for name in imported} <= {
        *("__future__", "collections", "contextlib", "errno", "fcntl", "io", "json", "os", "pathlib", "secrets"),
        *("shutil", "stat", "time", "typing"),
    }
