"""The page in a real browser: chromium, driven by playwright."""

import json
import shutil
import threading

import pytest
from described import described, submitted, until

from lightning_egeria.workflow.home import Home

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
serving = pytest.importorskip("lightning_egeria.workflow.serving", reason="starlette and uvicorn are an extra")
uvicorn = pytest.importorskip("uvicorn", reason="starlette and uvicorn are an extra")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TOKEN, OWNED = "right", "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
    pytest.mark.filterwarnings("ignore"),  # those of playwright
]


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "home")
    with home.history() as history:
        for name in ("waits", "fails"):
            submitted(home, described(tmp_path / name, name=name), history)
        history.update(2, state="failed", started=1.0, ended=61.0, message=OWNED)
    home.folder(2).tell("execute", OWNED)
    points = [{"step": step, "values": {OWNED: 1 / (step + 1)}} for step in range(9)]
    (home.folder(2).results / "egeria.json").write_text(json.dumps({"metrics": points}))
    return home


@pytest.fixture
def address(home):
    server = uvicorn.Server(uvicorn.Config(serving.application(home, TOKEN, actions=True), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/{TOKEN}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def page():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        yield page
        assert page.errors == []
        browser.close()


def test_jobs_are_seen_and_changed_with_the_token_only(address, page, home):
    page.goto(f"{address.removesuffix(TOKEN)}wrong/")
    assert "The token is missing or wrong." in page.inner_text("body")
    page.goto(f"{address}/")
    assert page.locator("tbody tr").count() == 2
    page.click("a >> text='2'")
    assert page.inner_text("h1").split() == ["2", "fails", "failed"]
    assert page.locator("svg polyline").bounding_box()["width"] > 300
    assert OWNED in page.inner_text("pre >> nth=1")
    assert page.title() == "2 fails"  # no script of the job has run
    page.click("a >> text='Jobs'")
    page.click("a >> text='1'")
    page.click("button")
    assert page.inner_text("h1").split() == ["1", "waits", "cancelled"]
    assert page.inner_text("button") == "resume"
    with home.history() as history:
        assert history.get(1).state.value == "cancelled"


def test_a_narrow_window_cuts_nothing_off(address, page):
    page.set_viewport_size({"width": 380, "height": 700})
    page.goto(f"{address}/jobs/2")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.querySelector('main')).overflowX") == "auto"


def test_the_list_shows_what_happens(address, page, home):
    page.goto(f"{address}/")
    with home.history() as history:
        history.update(1, state="running", started=1.0)
    page.wait_for_selector(".running", timeout=20_000)
