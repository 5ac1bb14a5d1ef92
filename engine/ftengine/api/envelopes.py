"""How each API words an error: one table from exception to status, and one body form for each API.

Overlong prompts are worded so that each client understands them: Claude Code reads the two numbers, Codex and
OpenCode the code.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal, TypedDict

from ftengine.errors import EngineCannotStart, EngineDied, EngineRefused, NotFound, PromptTooLong, RequestError


class AnthropicDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicDetail
    request_id: str


class OpenAIDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    error: OpenAIDetail


@dataclass(frozen=True)
class Problem:
    """`code` is a word that OpenAI clients look at; `tokens` is set for an overlong prompt: (prompt, maximum)."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    tokens: tuple[int, int] | None = None


def problem(error: BaseException) -> Problem:
    """500 with no details for anything that is not raised on purpose."""
    if isinstance(error, PromptTooLong):
        return Problem(400, str(error), code="context_length_exceeded", tokens=(error.tokens, error.maximum))
    if isinstance(error, NotFound):
        return Problem(404, str(error), error.param, "model_not_found" if error.param == "model" else None)
    if isinstance(error, RequestError):
        return Problem(error.status, str(error), error.param)
    if isinstance(error, EngineCannotStart):  # nothing that another attempt could find otherwise
        return Problem(500, str(error))
    if isinstance(error, EngineDied) or (isinstance(error, EngineRefused) and error.overloaded):
        return Problem(503, str(error))
    if isinstance(error, EngineRefused):
        return Problem(500, str(error))
    return Problem(500, "internal error; the server's log says more")


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    431: "request_too_large",
    503: "overloaded_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_status(status: int) -> int:
    """Anthropic's own clients know "no room now" as 529."""
    return 529 if status == 503 else status


def anthropic_body(found: Problem) -> AnthropicError:
    message = found.message
    if found.tokens:
        message = f"prompt is too long: {found.tokens[0]} tokens > {found.tokens[1]} maximum"
    kind = _ANTHROPIC_TYPES.get(found.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": "req_" + secrets.token_hex(12),
    }


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}


def openai_error(found: Problem) -> OpenAIDetail:
    """The inner object, which Responses' `response.failed` carries too."""
    message = found.message
    if found.tokens:
        message = (
            f"This model's maximum context length is {found.tokens[1]} tokens. "
            f"However, your messages resulted in {found.tokens[0]} tokens."
        )
    kind = _OPENAI_TYPES.get(found.status, "invalid_request_error" if found.status < 500 else "server_error")
    return {"message": message, "type": kind, "param": found.param, "code": found.code}


def openai_body(found: Problem) -> OpenAIError:
    return {"error": openai_error(found)}


def envelope(path: str, found: Problem) -> tuple[int, AnthropicError | OpenAIError]:
    """Status and body for the API that `path` belongs to."""
    if is_anthropic(path):
        return anthropic_status(found.status), anthropic_body(found)
    return found.status, openai_body(found)
