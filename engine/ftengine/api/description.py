"""The OpenAPI description of every endpoint, made from the structs that the routes decode and the forms of errors.

Of answers it gives media types, not fields: each API's vendor documents those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from ftengine.api.anthropic.request import MessagesRequest
from ftengine.api.chat.request import ChatRequest
from ftengine.api.completions.request import CompletionRequest
from ftengine.api.envelopes import AnthropicError, OpenAIError, anthropic_status, is_anthropic
from ftengine.api.guard import OPEN_PATHS
from ftengine.api.responses.request import ResponsesRequest
from ftengine.api.trace import MEDIA_TYPE, TraceRequest

PATH = "/openapi.json"
VERSION = "1"  # of the endpoints together, not of the package


@dataclass(frozen=True)
class Operation:
    summary: str
    body: type[msgspec.Struct] | None = None
    streams: bool = False  # where the body asks for it
    query: str | None = None  # a parameter's name
    binary: bool = False  # a file, not JSON


OPERATIONS = {
    ("GET", "/"): Operation("Probe: which server this is"),
    ("GET", "/api/hello"): Operation("Probe"),
    ("GET", "/health"): Operation("State and load progress"),
    ("GET", PATH): Operation("This description"),
    ("GET", "/v1/models"): Operation("The model served, as a list"),
    ("GET", "/v1/models/{id}"): Operation("The model served"),
    ("GET", "/v1/stats"): Operation("Counters since the server's start", query="layers"),
    ("POST", "/v1/trace"): Operation("Record the routing of the next decode steps", TraceRequest, binary=True),
    ("POST", "/v1/messages"): Operation("Anthropic Messages", MessagesRequest, streams=True),
    ("POST", "/v1/messages/count_tokens"): Operation("Tokens of a Messages prompt", MessagesRequest),
    ("POST", "/v1/chat/completions"): Operation("OpenAI Chat Completions", ChatRequest, streams=True),
    ("POST", "/v1/completions"): Operation("OpenAI Completions", CompletionRequest, streams=True),
    ("POST", "/v1/responses"): Operation("OpenAI Responses", ResponsesRequest, streams=True),
}

_ERRORS = {
    400: "Malformed, of a wrong type, out of range, or a prompt longer than the context",
    401: "The key is missing or wrong",
    403: "A foreign Host or Origin, or a page of another site",
    404: "This model is not served here",
    413: "Larger than the server's limits",
    415: "Not application/json, or compressed",
    431: "Headers larger than the server's limit",
    500: "The server's fault; its log says more",
    503: "The engine died, cannot be started, or has no room now",
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


@cache
def document(*, keyed: bool) -> bytes:
    """JSON. `keyed`: the server asks for a key."""
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    types = list(dict.fromkeys((*bodies, AnthropicError, OpenAIError)))
    references, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    forms = dict(zip(types, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, forms, keyed)
    components = {"schemas": schemas, **({"securitySchemes": _SCHEMES} if keyed else {})}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "ftlaunch",
                "version": VERSION,
                "description": "Unknown fields of a body are passed over. HEAD is answered wherever GET is, "
                "another method with 405, another path with 404.",
            },
            "paths": paths,
            "components": components,
        }
    )


def _operation(path: str, operation: Operation, forms: dict[Any, Any], keyed: bool) -> dict[str, Any]:
    locked = keyed and path not in OPEN_PATHS
    answers: dict[str, Any] = (
        {MEDIA_TYPE: {}} if operation.binary else {"application/json": {"schema": {"type": "object"}}}
    )
    success: dict[str, Any] = {"description": "The answer", "content": answers}
    if operation.streams:
        answers["text/event-stream"] = {}
        limit = {"description": "Tokens that the answer may have", "schema": {"type": "integer", "minimum": 1}}
        success["headers"] = {"ft-max-tokens": limit}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "security": [{name: []} for name in _SCHEMES] if locked else [],
        "responses": {"200": success, **dict(_refusals(path, operation, forms, locked))},
    }
    parameters = [(name, "path") for name in re.findall(r"{(\w+)}", path)]
    if operation.query is not None:
        parameters.append((operation.query, "query"))
    if parameters:
        described["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
            for name, where in parameters
        ]
    if operation.body is not None:
        body = {"application/json": {"schema": forms[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _refusals(path: str, operation: Operation, forms: dict[Any, Any], locked: bool) -> Iterator[tuple[str, Any]]:
    """What can be answered besides 200, with its body in the form of the API that `path` belongs to."""
    anthropic = is_anthropic(path)
    form = {"application/json": {"schema": forms[AnthropicError if anthropic else OpenAIError]}}
    for status, description in _ERRORS.items():
        if status == 431:
            yield str(status), {"description": description}  # from below the routes, without a body
        elif _occurs(status, path, operation, locked):
            shown = anthropic_status(status) if anthropic else status
            yield str(shown), {"description": description, "content": form}


def _occurs(status: int, path: str, operation: Operation, locked: bool) -> bool:
    if status in (403, 413):
        return True  # the guard looks at every request
    if status == 401:
        return locked
    if status == 404:
        return operation.body is not None or "{" in path
    return operation.body is not None
