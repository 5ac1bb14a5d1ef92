"""Every error the engine and the front raise on purpose.

FtError                       one sentence for a person, and the next command to type
├── CheckpointError           the model's files are missing, damaged or of a kind that is not served
├── ConfigError               a setting is impossible or two settings contradict each other
├── EngineDied                the engine process ended while requests ran, or cannot be started again
│   └── EngineCannotStart     it has refused its settings or the model; the server is about to end
├── EngineRefused             one request could not be served; the engine lives
└── RequestError              the client's request is at fault: 4xx
    ├── BadRequest            400 malformed or out of range
    ├── PromptTooLong         400 more tokens than the context holds; each API words it as its clients expect
    ├── TooLarge              413 body or message limits
    ├── NotFound              404 unknown model or path
    └── Forbidden             403 / 401 host, origin or key
"""

from __future__ import annotations

import re
import shlex


class FtError(Exception):
    """`str(error)` is one sentence; `next_step` is a command or setting that helps, or empty."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step


class CheckpointError(FtError):
    pass


class ConfigError(FtError):
    pass


class EngineDied(FtError):
    pass


class EngineCannotStart(EngineDied):
    pass


class EngineRefused(FtError):
    """`overloaded`: nothing is wrong with the request, there is no room for it now."""

    def __init__(self, message: str, *, overloaded: bool = False) -> None:
        super().__init__(message)
        self.overloaded = overloaded


class RequestError(FtError):
    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequest(RequestError):
    pass


class PromptTooLong(RequestError):
    def __init__(self, tokens: int, maximum: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens, the context holds {maximum}")
        self.tokens = tokens
        self.maximum = maximum


class TooLarge(RequestError):
    status = 413


class NotFound(RequestError):
    status = 404


class Forbidden(RequestError):
    """`status` is 401 when a key is missing or wrong."""

    def __init__(self, message: str, *, status: int = 403) -> None:
        super().__init__(message)
        self.status = status


def for_model(step: str, model: str) -> str:
    """A next step whose `ft serve` commands name the model, so that they can be typed as they stand.

    model: a name or a path, as it is given to --model.
    """

    def named(command: re.Match[str]) -> str:
        return command[0] if "--model" in command[0] else f"ft serve --model {shlex.quote(model)}{command[1]}"

    return re.sub(r"\bft serve\b([^,]*)", named, step)
