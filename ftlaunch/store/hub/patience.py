"""Trying again: how often, how long between, and when to stop and say so."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftlaunch.store.hub.errors import HubError, Passing, check_patience
from ftlaunch.store.hub.limits import Limits

Say = Callable[[str], None]
Sleep = Callable[[float], object]


class Patience:
    """For one thing that is wanted: `after` each trouble, `progress` whenever something was won."""

    def __init__(self, limits: Limits, what: str, say: Say, sleep: Sleep = time.sleep, step: str = "") -> None:
        self._limits = limits
        self._what = what
        self._say = say
        self._sleep = sleep
        self._step = step or "the same command again goes on from there"
        self._attempt = 0

    def progress(self) -> None:
        self._attempt = 0

    def after(self, trouble: Passing) -> None:
        """Wait for the next attempt. Raises HubError when there is none."""
        self._attempt += 1
        check_patience(trouble.retry_after, f"the server of {self._what}")
        if self._attempt >= self._limits.attempts:
            raise HubError(f"{self._what} cannot be had: {trouble} ({self._attempt} attempts)", self._step) from None
        wait = self._limits.wait(self._attempt) if trouble.retry_after is None else trouble.retry_after
        self._say(f"{self._what}: {trouble}; next attempt in {wait:.0f} s")
        self._sleep(wait)
