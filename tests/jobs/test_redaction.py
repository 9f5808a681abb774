import html
import json
import os
import re
import shlex
import subprocess
import time
from urllib.parse import quote, quote_plus, urlencode
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_egeria.jobs.redaction import Redactor, forms_of, looks_secret

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


def in_shell(value, script):
    """What bash says of an environment with the secret."""
    variables = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "KEY": value}
    done = subprocess.run(["bash", "-c", f"exec 2>&1; {script}"], env=variables, capture_output=True, check=True)
    return done.stdout.decode()


WAYS = {
    "quote, as for AWS": quote,
    "quote of everything": lambda value: quote(value, safe=""),
    "quote_plus": quote_plus,
    "lower-case hex": lambda value: quote(value, safe="").lower() if value.islower() else value,
    "urlencode": lambda value: urlencode({"key": value}),
    "encodeURIComponent": lambda value: quote(value, safe="!'()*"),
    "JSON": json.dumps,
    "JSON of PHP": lambda value: json.dumps(value).replace("/", "\\/"),
    "JSON with letters": lambda value: json.dumps(value, ensure_ascii=False),
    "HTML": html.escape,
    "HTML without quotes": lambda value: html.escape(value, quote=False),
    "HTML of Jinja": lambda value: html.escape(value).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    "a shell": shlex.quote,
    "Python": repr,
    "Python in ASCII": ascii,
    "Python in bytes": lambda value: repr(value.encode()),
    "Python within Python": lambda value: repr(f"{value!r} \"'"),
    "JSON within JSON": lambda value: json.dumps(json.dumps(value)),
    "JSON within Python": lambda value: repr({"answer": json.dumps(value)}),
    "Python within JSON": lambda value: json.dumps({"message": repr(value)}),
    "JSON within an address": lambda value: quote(json.dumps(value)),
    "JSON within HTML": lambda value: html.escape(json.dumps(value)),
    "JSON of Go": lambda value: re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value)),
    "export -p": lambda value: in_shell(value, "export -p"),
    "declare -p": lambda value: in_shell(value, "declare -p KEY"),
    "set -x": lambda value: in_shell(value, 'set -x; : "$KEY"'),
    "printf %q": lambda value: in_shell(value, 'printf %q "$KEY"'),
    "CSV": lambda value: '"' + value.replace('"', '""') + '"',
    "SQL": lambda value: "'" + value.replace("'", "''") + "'",
    "YAML": yaml.safe_dump,
    "an attribute of XML": lambda value: ElementTree.tostring(ElementTree.Element("a", {"b": value})).decode(),
    "without spaces around it": str.strip,
    "on a terminal": lambda value: value.replace("\n", "\r\n"),
}


SECRETS_TO_QUOTE = ["abc/def+ghi=", "two words", "it's", 'pa"ss\\word123', "a<&>!*(x)", "a\tb/c d", "pa$$w0rd`x"]
SECRETS_TO_QUOTE += ["it's \"$q", "trailing\n"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("secret", SECRETS_TO_QUOTE)
def test_no_way_to_write_a_secret_passes(way, secret):
    written = WAYS[way](secret)
    redactor = Redactor({"KEY": secret})
    shown = redactor.feed(f"before {written} after".encode()) + redactor.end()
    assert b"[KEY]" in shown
    assert written.encode() not in shown
    for form in forms_of(secret):
        assert form not in shown


@pytest.mark.parametrize("way", [repr, ascii, json.dumps, quote, html.escape, shlex.quote])
def test_letters_beyond_ascii(way):
    redactor = Redactor({"KEY": "é<&>!*(x)"})
    assert b"[KEY]" in redactor.feed(way("é<&>!*(x)").encode()) + redactor.end()


def test_a_long_secret_does_not_hold_up_the_output():
    key = "-----BEGIN KEY-----\n" + "ab'\"/+\\\n" * 400
    redactor, began = Redactor({"KEY": key}), time.process_time()
    for _ in range(20):
        redactor.feed(b"-----BEGIN nothing of the kind" * 2000)
    assert time.process_time() - began < 5


def test_what_looks_like_a_secret():
    names = ["TOK", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "GITHUB_PAT", "X-Auth-Token"]
    names += ["PGPASSWORD", "MYSQL_PWD", "SSHPASS", "HFTOKEN", "dbPassword", "NPM_CONFIG__AUTH"]
    assert all(looks_secret(name, "0123456789") for name in names)
    assert not any(
        looks_secret(name, "0123456789") for name in ("PATH", "PWD", "OLDPWD", "KEYBOARD", "SSH_AUTH_SOCK", "TERM")
    )
    assert not looks_secret("RAY_AUTH_TOKEN", "token")


def test_only_what_may_be_a_secret_is_held_back():
    redactor = Redactor({"KEY": "secret"})
    assert redactor.feed(b"progress 10%\r") == b"progress 10%\r"
    assert (redactor.feed(b"se"), redactor.feed(b"ven")) == (b"", b"seven")
    assert Redactor({}).feed(b"x") == b"x"
