"""The server's own log: to standard error, one line a fact."""

from __future__ import annotations

import logging
import sys


class OneLine(logging.Formatter):
    """A record is one line, whatever a client put into a path or a name; a traceback keeps its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


def set_up(level: str) -> None:
    """Idempotent. Touches only this package's and uvicorn's loggers, so that an embedding program keeps its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("ftengine")
    ours.handlers = [handler]
    ours.setLevel(level.upper())
    ours.propagate = False
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name == "uvicorn" else []
        logger.setLevel("ERROR")
        logger.propagate = name != "uvicorn"
