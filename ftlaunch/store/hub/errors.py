"""What can go wrong between here and the Hub.

FtError
└── HubError          a person must act: the sentence says what, and what to type
Passing               worth another attempt; `retry_after` is the server's own wish, in seconds
"""

from __future__ import annotations

from ftengine.errors import FtError
from ftlaunch.store.hub.limits import MAX_RETRY_AFTER


class HubError(FtError):
    pass


class Passing(Exception):
    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


def seconds(header: str | None) -> float | None:
    """Of a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3); None for none or nonsense."""
    if not header:
        return None
    try:
        return max(0.0, float(header)) if header.strip().replace(".", "", 1).isdigit() else _until(header)
    except (ValueError, TypeError, OverflowError):
        return None


def _until(date: str) -> float:
    from datetime import datetime, timezone
    from email.utils import parsedate_to_datetime

    when = parsedate_to_datetime(date)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())


def check_patience(retry_after: float | None, host: str) -> None:
    """Raises HubError when a server asks for more patience than a program should have on a person's behalf."""
    if retry_after is not None and retry_after > MAX_RETRY_AFTER:
        raise HubError(
            f"{host} asks to wait {retry_after:.0f} seconds before the next request",
            "the same command after that; it goes on where it stopped",
        )


def no_access(repo: str, endpoint: str, gated: bool, has_token: bool) -> HubError:
    """401 and 403. A repository that is not there is answered like one that is hidden, so both are named."""
    if gated:
        step = f"accept its terms at {endpoint}/{repo}, then: HF_TOKEN=hf_... ft pull {repo}"
        return HubError(f"{repo} is given only to those who have accepted its terms on the Hub", step)
    if has_token:
        return HubError(f"the Hub has no model {repo}, or your token may not read it", f"look at {endpoint}/{repo}")
    return HubError(
        f"the Hub has no model {repo}, or it is private and no token is set",
        f"check the name; if it is private: HF_TOKEN=hf_... ft pull {repo}",
    )
