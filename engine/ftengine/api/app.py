"""The ASGI application: every route, and every exception's way into an API's own envelope."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from ftengine.api import anthropic, chat, completions, control, responses, trace
from ftengine.api.envelopes import Problem, envelope, problem
from ftengine.api.front import Front, client_name
from ftengine.api.guard import Guard
from ftengine.api.http import ClientLeft, json_response
from ftengine.errors import FtError

log = logging.getLogger("ftengine.api")


def build_app(front: Front) -> Starlette:
    def answer(request: Request, found: Problem, headers: Mapping[str, str] | None = None) -> Response:
        status, body = envelope(request.url.path, found)
        front.totals.refused[str(status)] += 1
        log.info("%s %s %s: %d %s", request.method, request.url.path[:100], client_name(request), status, found.message)
        return json_response(body, status, headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        return answer(request, problem(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = {404: "not found", 405: "this method is not allowed here"}.get(error.status_code, error.detail)
        found = Problem(error.status_code, f"{text}: {request.method} {request.url.path[:200]}")
        return answer(request, found, error.headers)  # of a 405: Allow

    async def on_left(request: Request, error: Exception) -> Response:
        log.info("%s %s: the client left", request.url.path[:100], client_name(request))
        return Response(status_code=499)  # nobody reads it

    modules = (control, trace, anthropic, chat, completions, responses)
    app = Starlette(
        routes=[route for module in modules for route in module.routes(front)],
        middleware=[Middleware(Guard, settings=front.settings, refused=front.totals.refused)],
        exception_handlers={FtError: on_fault, HTTPException: on_http, ClientLeft: on_left, Exception: on_fault},
    )
    app.router.redirect_slashes = False
    return app
