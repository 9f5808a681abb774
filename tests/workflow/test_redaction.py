import json
from urllib.parse import quote

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.workflow.redaction import Redactor

SECRETS = {"ONE": "abab", "TWO": "abc", "LONG": "abab\nx", "EMPTY": ""}


@settings(max_examples=60)
@given(st.lists(st.text("abcx\n", max_size=6), max_size=12))
def test_no_secret_passes_however_the_output_is_cut(parts):
    redactor = Redactor(SECRETS)
    shown = b"".join(redactor.feed(part.encode()) for part in parts) + redactor.end()
    for secret in ("abab", "abc"):
        assert secret not in shown.decode()


@settings(max_examples=60)
@given(st.lists(st.text("abcx\n", max_size=6), max_size=12), st.integers(0, 3))
def test_what_holds_no_secret_stays(parts, seed):
    text = "".join(parts).replace("ab", "")
    redactor = Redactor(SECRETS)
    shown = (
        b"".join(redactor.feed(text[place : place + 2].encode()) for place in range(0, len(text), 2)) + redactor.end()
    )
    assert shown.decode() == text


def test_other_ways_to_write_a_secret():
    secret = 'a"b\\c\n/é'
    as_json = f"{json.dumps(secret)} {json.dumps([secret], ensure_ascii=False)}"
    shown = f"{secret} {secret!r} {as_json} {quote(secret, safe='')}"
    redactor = Redactor({"KEY": secret})
    found = (redactor.feed(shown.encode()) + redactor.end()).decode()
    assert found == '[KEY] \'[KEY]\' "[KEY]" ["[KEY]"] [KEY]'


def test_only_what_may_be_a_secret_is_held_back():
    redactor = Redactor({"KEY": "secret"})
    assert redactor.feed(b"progress 10%\r") == b"progress 10%\r"
    assert (redactor.feed(b"se"), redactor.feed(b"ven")) == (b"", b"seven")
    assert Redactor({}).feed(b"x") == b"x"
