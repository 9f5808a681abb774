"""The page of jobs as a web application, for this machine only.

Other users of the machine reach it too, so that each address begins with a token. A cookie would go to the pages of all
ports of this machine, and so to theirs.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from lightning_egeria.errors import EgeriaError, QueueError
from lightning_egeria.programs import files
from lightning_egeria.workflow.backends import backend
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.page import curves_in, error_page, job_page, jobs_page
from lightning_egeria.workflow.refreshing import keep_state
from lightning_egeria.workflow.rundirs import EXPLANATION
from lightning_egeria.workflow.submission import cancel, resume

_LATEST, _LOG_BYTES, _PART, _LARGEST = 200, 20_000, 2**16, 2**20
_LONGEST_ID = 18  # digits
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_Page = Callable[[Request, int], Response]


def application(home: Home, token: str, actions: bool = False) -> Starlette:
    """Return the web application.

    Args:
        home: of the jobs.
        token: what each address begins with; without it, nothing is shown or changed.
        actions: whether the page may cancel and resume jobs.
    """
    top = f"/{token}/"

    def index(request: Request, id: int) -> Response:
        with home.history() as history:
            for row in history.unfinished():
                if row.backend != "local":  # whose queue keeps the history
                    keep_state(history, row, home.folder(row.id))
            rows = history.unfinished() + history.finished(_LATEST)
        return HTMLResponse(jobs_page(rows, time.time(), top), headers=_HEADERS)

    def job(request: Request, id: int) -> Response:
        with home.history() as history:
            row = history.get(id)
        folder, explanation = home.folder(row.id), ""
        with contextlib.suppress(OSError):
            explanation = files.read_text(Path(row.run) / EXPLANATION, _LARGEST, links=False, errors="replace")
        log = _end_of(folder.log)
        page = job_page(row, time.time(), log, explanation, curves_in(folder.results), top, actions)
        return HTMLResponse(page, headers=_HEADERS)

    def log(request: Request, id: int) -> Response:
        with home.history() as history:
            row = history.get(id)
        try:
            parts = _parts_of(home.folder(row.id).log)
        except OSError as error:
            raise QueueError(f"job {id} has no log that can be read") from error
        return StreamingResponse(parts, headers=_HEADERS, media_type="text/plain")

    def change(request: Request, id: int) -> Response:
        if not actions:
            return HTMLResponse(error_page("This page only shows jobs: serve has no --actions.", top), 403, _HEADERS)
        with home.history() as history:
            chosen = backend(history.get(id).backend, home)
            if request.url.path.endswith("/cancel"):
                cancel(home, history, chosen, id)
            else:
                resume(home, history, chosen, id)
        return RedirectResponse(f"{top}jobs/{id}", 303, _HEADERS)

    def guarded(page: _Page) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            if not hmac.compare_digest(request.path_params["token"].encode(errors="replace"), token.encode()):
                return HTMLResponse(error_page("The token is missing or wrong."), 403, _HEADERS)
            id = request.path_params.get("id", "0")
            if not (id.isascii() and id.isdecimal() and len(id) <= _LONGEST_ID):
                return HTMLResponse(error_page("There is no such job.", top), 404, _HEADERS)
            try:
                return page(request, int(id))
            except EgeriaError as error:
                return HTMLResponse(error_page(str(error), top), 404, _HEADERS)

        return answer

    async def nothing(request: Request, error: Exception) -> Response:
        return HTMLResponse(error_page("There is no such page, or its token is missing."), 404, _HEADERS)

    routes = [
        Route("/{token}/", guarded(index)),
        Route("/{token}/jobs/{id}", guarded(job)),
        Route("/{token}/jobs/{id}/log", guarded(log)),
        Route("/{token}/jobs/{id}/cancel", guarded(change), methods=["POST"]),
        Route("/{token}/jobs/{id}/resume", guarded(change), methods=["POST"]),
    ]
    # Another site may point a name of its own at this machine; its pages may not read ours.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    application = Starlette(routes=routes, middleware=[hosts], exception_handlers={404: nothing})
    application.router.redirect_slashes = False  # the answer would not have our headers
    return application


def serve(home: Home, port: int, actions: bool = False) -> None:
    """Serve the page on 127.0.0.1 until it is interrupted; prints its address.

    Args:
        home: of the jobs.
        port: to listen to.
        actions: whether the page may change jobs.
    """
    token = secrets.token_urlsafe(16)
    print(f"http://127.0.0.1:{port}/{token}/", flush=True)
    uvicorn.run(application(home, token, actions), host="127.0.0.1", port=port, log_level="warning")


def _end_of(path: Path) -> str:
    with contextlib.suppress(OSError), files.reading(path, links=False) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _LOG_BYTES, 0))
        return file.read(_LOG_BYTES).decode(errors="replace")
    return ""


def _parts_of(path: Path) -> Iterator[bytes]:
    file = files.reading(path, links=False)

    def parts() -> Iterator[bytes]:
        with file:
            left = os.fstat(file.fileno()).st_size  # a job that runs adds to it meanwhile
            while left > 0 and (part := file.read(min(left, _PART))):
                left -= len(part)
                yield part

    return parts()
