"""Recordings of routing that the front asks for: begun, carried on between two steps, ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ftengine.wire import StopTrace, Trace, Traced

if TYPE_CHECKING:
    from ftengine.experts.recording import Recording

ON_CPU = "the CPU engine has no cache of experts whose routing could be recorded; start the server on a GPU"
NO_EXPERTS = "the model has no routed experts, so there is no routing to record"
BUSY = "a recording is under way"

log = logging.getLogger(__name__)


class Tracing:
    """At most one recording at a time. Costs nothing while there is none."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._recording: Recording | None = None
        self._id = 0

    def take(self, message: Trace | StopTrace) -> list[Traced]:
        if isinstance(message, StopTrace):
            if self._recording is not None and message.id == self._id:
                self._end()
            return []
        refusal = self._begin(message)
        return [Traced(message.id, refusal=refusal)] if refusal else []

    def advance(self) -> list[Traced]:
        """Between two steps. The recording, once it is whole, or why it never will be."""
        recording = self._recording
        if recording is None:
            return []
        try:
            if not recording.advance():
                return []
            found = Traced(self._id, recording.encode())
        except RuntimeError as error:
            log.error("the recording of routing failed", exc_info=error)
            found = Traced(self._id, refusal=f"the recording failed: {error}")
        self._recording = None
        return [found]

    def _begin(self, message: Trace) -> str:
        """Why not; empty if it begins."""
        experts = getattr(self._model, "experts", None)
        if experts is None:
            return ON_CPU
        if experts.pool is None:
            return NO_EXPERTS
        if self._recording is not None:
            return BUSY
        # Imported here: there is no Triton where there is no GPU.
        from ftengine.experts.recording import Recording

        try:
            self._recording, self._id = Recording(experts.pool, message.steps), message.id
        except ValueError as error:
            return str(error)
        log.info("recording the routing of %d decode steps", message.steps)
        return ""

    def _end(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
