"""What a target takes, from its source: nothing is imported, so a stranger's configuration runs nothing."""

import subprocess
import sys

import pytest

from lightning_egeria.cli.signatures import parameters_of
from lightning_egeria.errors import ArgumentError


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that says so when it is imported."""
    folder = tmp_path / "strange"
    (folder / "deep").mkdir(parents=True)
    ran = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (folder / "__init__.py").write_text(ran + "from .deep.one import Net as Renamed\nfrom strange.deep import two\n")
    (folder / "deep" / "__init__.py").write_text(ran)
    (folder / "deep" / "one.py").write_text(
        ran + "class Net:\n    def __init__(self, width, *, depth=3): pass\n"
        "class Sub(Net): pass\ndef make(a, **rest): pass\nif True:\n    def hidden(b): pass\nVALUE = 3\n"
    )
    (folder / "deep" / "two.py").write_text(ran + "def __getattr__(name): pass\n")
    (folder / "deep" / "broken.py").write_text(ran + "def (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()
    assert not [name for name in sys.modules if name.startswith("strange")]


@pytest.mark.parametrize(
    ("target", "names", "open_ended"),
    [
        ("strange.deep.one.Net", ["width", "depth"], False),
        ("strange.Renamed", ["width", "depth"], False),
        ("strange.deep.one.Sub", [], True),
        ("strange.deep.one.make", ["a"], True),
        ("strange.deep.one.hidden", ["b"], False),
        ("strange.deep.one.VALUE", [], True),
        ("strange.deep.two.anything", [], True),
        ("strange.deep.broken.anything", [], True),
        ("strange.two.anything", [], True),
        ("torch.nn.Linear", ["in_features", "out_features", "bias", "device", "dtype"], False),
        ("this.s", [], True),
        ("antigravity.webbrowser", [], True),
    ],
)
def test_what_a_target_takes(package, target, names, open_ended):
    found, rest = parameters_of(target, "key", importing=False)
    assert (list(found), rest) == (names, open_ended)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("strange.deep.one.Nett", "Did you mean 'strange.deep.one.Net'?"),
        ("nowhere.deep.Net", "No module named 'nowhere'"),
        ("strange.deep.three.Net", "cannot find"),
        ("strange..one", "Expected a name"),
        ("", "Expected a name"),
        ("a/../b.c", "Expected a name"),
    ],
)
def test_a_target_that_is_not_there(package, target, words):
    with pytest.raises(ArgumentError, match=r"^key: cannot find") as error:
        parameters_of(target, "key", importing=False)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "target",
    [
        "this.s",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("antigravity.x", "lib2to3.pgen2.driver.main")),
        pytest.param("idlelib.idle.x", marks=pytest.mark.slow),
    ],
)
def test_a_description_imports_no_module_of_its_choice(tmp_path, target):
    """As a user runs it: `egeria jobs submit --dry-run` in a process of its own."""
    (tmp_path / "job.yaml").write_text(
        f"name: a\nentry:\n  experiment: default\n  overrides: [trainer=cpu, +callbacks.x._target_={target}]\n"
    )
    code = (
        "import sys; from lightning_egeria.command import main\n"
        f"main(['jobs', '--home', {str(tmp_path / 'home')!r}, 'submit', '--dry-run', {str(tmp_path / 'job.yaml')!r}])\n"
        f"print('IMPORTED', {target.partition('.')[0]!r} in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert "IMPORTED False" in told.stdout, told.stderr
    assert "Zen of Python" not in told.stdout
