import asyncio
import os

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


TOKEN = "right"


def ask(home, path, method="GET", host="127.0.0.1", token=TOKEN, actions=False):
    """Send one request to the application, below the address of a token; return its status, headers and text."""
    sent = []
    path = path if token is None else f"/{token}{path}"

    asked = []

    async def receive():
        if asked:
            await asyncio.Event().wait()  # the browser stays
        asked.append(True)
        return {"type": "http.request", "body": b"", "more_body": False}

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
    asyncio.run(serving.application(home, TOKEN, actions)(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:]).decode()


@pytest.mark.parametrize("id", [10**17, 10**18, 10**30, "9" * 5000, "-1", "\u0661", "1.5", "x", "%31", "1/", "0"])
def test_no_job_has_such_an_id(id, home):
    for path in (f"/jobs/{id}", f"/jobs/{id}/log"):
        status, headers, _ = ask(home, path)
        assert (status, "frame-ancestors 'none'" in headers["content-security-policy"]) == (404, True)
    assert ask(home, f"/jobs/{id}/cancel", "POST", actions=True)[0] == 404


def test_pages(home):
    status, headers, text = ask(home, "/")
    policy = [part.strip() for part in headers["content-security-policy"].split(";")]
    assert (status, policy[0]) == (200, "default-src 'none'")
    assert {"frame-ancestors 'none'", "base-uri 'none'"} <= {*policy}
    assert '<a href="/right/jobs/1">1</a>' in text
    status, _, text = ask(home, "/jobs/1")
    assert "&lt;script&gt;" in text
    assert "freezing: off: a command takes no methods" in text
    assert "<form" not in text
    status, headers, text = ask(home, "/jobs/1/log")
    assert (headers["content-type"].split(";")[0], "<script>" in text) == ("text/plain", True)
    assert [ask(home, path)[0] for path in ("/jobs/9", "/jobs/x", "/jobs/../x", "/jobs/1/log/../../x")] == [404] * 4
    assert "<form" in ask(home, "/jobs/1", actions=True)[2]


@pytest.mark.parametrize("path", ["/", "/jobs/1", "/jobs/1/log"])
@pytest.mark.parametrize("token", [None, "wrong", "", "Right", "right ", "rightright", "\xff"])
def test_nothing_is_shown_without_the_token(path, token, home):
    status, headers, text = ask(home, path, token=token)
    assert status in (403, 404)
    assert "hello" not in text
    assert "script" not in text
    assert "frame-ancestors" in headers["content-security-policy"]


def test_another_name_of_this_machine_is_refused(home):
    assert ask(home, "/", host="evil.example")[0] == 400


@pytest.mark.parametrize(
    ("token", "actions", "status"),
    [(None, True, 404), ("wrong", True, 403), ("", True, 404), (TOKEN, False, 403), (TOKEN, True, 303)],
)
def test_only_the_token_changes_a_job(token, actions, status, home):
    assert ask(home, "/jobs/1/cancel", "POST", token=token, actions=actions)[0] == status
    with home.history() as history:
        assert history.get(1).state is (State.CANCELLED if status == 303 else State.QUEUED)
    assert ask(home, "/jobs/1/cancel", actions=True)[0] == 405


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "pipe"])
def test_a_log_elsewhere_is_not_shown(target, home):
    log = home.folder(1).log
    log.unlink()
    os.mkfifo(log) if target == "pipe" else log.symlink_to(target)
    assert ask(home, "/jobs/1/log")[0] == 404
    assert "root:" not in ask(home, "/jobs/1")[2]


@pytest.mark.parametrize("steps", ["1" + "0" * 400, "[" * 50_000, "NaN", "1e999", '"x"', "[1]", "{}"])
def test_hostile_results_make_no_error(steps, home):
    text = '{"metrics": [{"step": %s, "values": {"a": 1}}, {"step": 2, "values": {"a": %s}}]}'
    (home.folder(1).results / "egeria.json").write_text(text % (steps, steps))
    assert ask(home, "/jobs/1")[0] == 200
