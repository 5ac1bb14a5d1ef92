"""Endpoints that ask no model: /health, /v1/models, /v1/stats, /openapi.json, and the probes that clients send."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ftengine.api import description
from ftengine.api.front import SCHEMA_VERSION, Front, context_length
from ftengine.api.http import json_response


def routes(front: Front) -> list[Route]:
    async def health(request: Request) -> Response:
        return json_response(front.health())

    async def root(request: Request) -> Response:
        return json_response({"name": "ftlaunch", "health": "/health", "model": front.settings.served_name})

    async def hello(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def models(request: Request) -> Response:
        entry = _model(front)
        return json_response(
            {
                "object": "list",
                "data": [entry],
                "has_more": False,
                "first_id": entry["id"],
                "last_id": entry["id"],
            }
        )

    async def model(request: Request) -> Response:
        front.check_model(request.path_params["id"])
        return json_response(_model(front))

    async def stats(request: Request) -> Response:
        return json_response(await counters(front, layers=request.query_params.get("layers") == "1"))

    async def openapi(request: Request) -> Response:
        keyed = front.settings.api_key is not None
        return Response(description.document(keyed=keyed), media_type="application/json")

    return [
        Route("/health", health, methods=["GET"]),
        Route("/", root, methods=["GET"]),
        Route("/api/hello", hello, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{id:path}", model, methods=["GET"]),
        Route("/v1/stats", stats, methods=["GET"]),
        Route(description.PATH, openapi, methods=["GET"]),
    ]


def _model(front: Front) -> dict[str, Any]:
    """One entry that both OpenAI's and Anthropic's clients can read."""
    started = front.totals.started
    context = context_length(front.engine)
    return {
        "id": front.settings.served_name,
        "object": "model",
        "type": "model",
        "display_name": front.settings.served_name,
        "created": int(started),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "owned_by": "local",
        "context_length": context,
        "max_model_len": context,
        "max_output_tokens": front.settings.max_output_tokens,
    }


async def counters(front: Front, *, layers: bool = False, seconds: float = 2.0) -> dict[str, Any]:
    """The answer of /v1/stats. seconds: how long the engine is waited for."""
    totals, ready = front.totals, front.engine.ready
    return {
        "version": SCHEMA_VERSION,
        "uptime_seconds": round(time.time() - totals.started, 3),
        "running": totals.running,
        "answers": dict(totals.answers),
        "outcomes": dict(totals.outcomes),
        "refused": dict(totals.refused),
        "tokens": {
            "prompt": totals.prompt_tokens,
            "cached": totals.cached_tokens,
            "output": totals.output_tokens,
        },
        "first_tokens": [first._asdict() for first in totals.first_tokens],
        "restarts": front.engine.restarts,
        "engine": await front.engine.stats(seconds, layers=layers),
        "facts": ready.facts if ready else None,
    }
