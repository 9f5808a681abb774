"""The page of jobs as a web application, for this machine only. Whatever changes a job needs a token."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.backends import backend
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.page import curves_in, error_page, job_page, jobs_page
from lightning_egeria.workflow.refreshing import keep_state
from lightning_egeria.workflow.rundirs import EXPLANATION
from lightning_egeria.workflow.submission import cancel, resume

_LATEST, _LOG_BYTES, _FORM_BYTES = 200, 20_000, 1_000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def application(home: Home, token: str | None = None) -> Starlette:
    """Return the web application.

    Args:
        home: of the jobs.
        token: whoever sends it may cancel and resume jobs; None lets nobody.
    """

    def index(request: Request) -> Response:
        with home.history() as history:
            for row in history.unfinished():
                if row.backend != "local":  # whose queue keeps the history
                    keep_state(history, row, home.folder(row.id))
            rows = history.unfinished() + history.finished(_LATEST)
        return HTMLResponse(jobs_page(rows, time.time()), headers=_HEADERS)

    def job(request: Request) -> Response:
        with home.history() as history:
            row = history.get(request.path_params["id"])
        folder, explanation = home.folder(row.id), ""
        with contextlib.suppress(OSError):
            explanation = (Path(row.run) / EXPLANATION).read_text()
        log = _end_of(folder.log)
        page = job_page(row, time.time(), log, explanation, curves_in(folder.results), token is not None)
        return HTMLResponse(page, headers=_HEADERS)

    def log(request: Request) -> Response:
        with home.history() as history:
            row = history.get(request.path_params["id"])
        return PlainTextResponse(home.folder(row.id).log.read_bytes(), headers=_HEADERS)

    async def change(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _FORM_BYTES:
                return HTMLResponse(error_page("too large"), 413, _HEADERS)
        given = parse_qs(body.decode(errors="replace")).get("token", [""])[0]
        if token is None or not hmac.compare_digest(given.encode(), token.encode()):
            return HTMLResponse(error_page("The token is missing or wrong."), 403, _HEADERS)
        id = request.path_params["id"]
        with home.history() as history:
            chosen = backend(history.get(id).backend, home)
            if request.url.path.endswith("/cancel"):
                cancel(home, history, chosen, id)
            else:
                resume(home, history, chosen, id)
        return RedirectResponse(f"/jobs/{id}", 303, _HEADERS)

    def refuse(request: Request, error: Exception) -> Response:
        return HTMLResponse(error_page(str(error)), 404, _HEADERS)

    routes = [
        Route("/", index),
        Route("/jobs/{id:int}", job),
        Route("/jobs/{id:int}/log", log),
        Route("/jobs/{id:int}/cancel", change, methods=["POST"]),
        Route("/jobs/{id:int}/resume", change, methods=["POST"]),
    ]
    # Another site may point a name of its own at this machine; its pages may not read ours.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={QueueError: refuse})


def serve(home: Home, port: int, actions: bool = False) -> None:
    """Serve the page on 127.0.0.1 until it is interrupted.

    Args:
        home: of the jobs.
        port: to listen to.
        actions: whether the page may change jobs; prints the token for it.
    """
    token = secrets.token_urlsafe(16) if actions else None
    print(f"http://127.0.0.1:{port}" + (f"  token: {token}" if token else ""), flush=True)
    uvicorn.run(application(home, token), host="127.0.0.1", port=port, log_level="warning")


def _end_of(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LOG_BYTES, 0))
        return file.read().decode(errors="replace")
    return ""
