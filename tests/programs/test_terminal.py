import io
import sys

import pytest

from lightning_egeria.core.programs.terminal import printable, say


@pytest.mark.parametrize(
    "text", ["\x1b]0;owned\x07", "\x9b2J", "\u202egnp.exe", "\ud800", "\x00", "a\rb", "\u200b", "\x1b[31m", "\x7f"]
)
def test_nothing_that_a_terminal_obeys_stays(text):
    shown = printable(f"a{text}b")
    assert shown.isprintable()
    assert len(shown) == len(text) + 2
    shown.encode()


def test_what_can_be_printed_stays():
    assert printable("größe 数 🙂") == "größe 数 🙂"
    assert printable("a\nb\tc", keep="\n") == "a\nb?c"
    assert printable(3) == "3"


def test_what_cannot_be_said_ends_nothing(monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    say("a line")
    assert sys.stderr.getvalue() == "a line\n"
