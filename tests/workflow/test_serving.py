import asyncio

import pytest
from described import all_reaped, described, submitted, until
from leftovers import child_processes

from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.jobfolders import State

serving = pytest.importorskip("lightning_egeria.workflow.serving", reason="starlette and uvicorn are an extra")


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    with home.history() as history:
        submitted(home, described(tmp_path), history)
    home.folder(1).tell("execute", "<script>")
    before = child_processes()
    yield home
    until(lambda: all_reaped(before))  # a queue that an action has started ends by itself


def ask(home, path, method="GET", body=b"", host="127.0.0.1", token=None):
    """Send one request to the application; return its status, headers and text."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", host.encode())],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
    }
    asyncio.run(serving.application(home, token)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:]).decode()


def test_no_job_has_so_large_an_id(home):
    assert ask(home, f"/jobs/{10**30}")[0] == 404


def test_pages(home):
    status, headers, text = ask(home, "/")
    assert (status, headers["content-security-policy"].split(";")[0]) == (200, "default-src 'none'")
    assert '<a href="/jobs/1">1</a>' in text
    status, _, text = ask(home, "/jobs/1")
    assert "&lt;script&gt;" in text
    assert "freezing: off: a command takes no methods" in text
    assert "<form" not in text
    status, headers, text = ask(home, "/jobs/1/log")
    assert (headers["content-type"].split(";")[0], "<script>" in text) == ("text/plain", True)
    assert [ask(home, path)[0] for path in ("/jobs/9", "/jobs/x", "/jobs/../x", "/jobs/1/log/../../x")] == [404] * 4


def test_another_name_of_this_machine_is_refused(home):
    assert ask(home, "/", host="evil.example")[0] == 400


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        (None, b"token=x", 403),
        (None, b"", 403),
        ("t", b"token=x", 403),
        ("t", b"", 403),
        ("t", b"x" * 2000, 413),
        ("t", b"token=t", 303),
    ],
)
def test_only_the_token_changes_a_job(token, body, status, home):
    assert ask(home, "/jobs/1/cancel", "POST", body, token=token)[0] == status
    with home.history() as history:
        assert history.get(1).state is (State.CANCELLED if status == 303 else State.QUEUED)
    assert ask(home, "/jobs/1/cancel", token=token)[0] == 405
