"""What a child may see of the user's environment.

Removing names is never enough on its own, because agents also read settings files: each provider sets its routing in
a place that those files cannot override as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ftproviders import vendor_names as names

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _full_match(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


_ROUTING = _full_match(names.ROUTING_PATTERNS)
_TELEMETRY = _full_match(names.TELEMETRY_PATTERNS)
_WORK = _full_match(names.WORK_PATTERNS)
_LIMIT = re.compile(names.LIMIT_PATTERN)
_VENDOR_KEY = re.compile(r"(.+)_API_KEY(?:_\d+)?")


def removed(environ: Iterable[str], *, strip_all: bool = False) -> tuple[str, ...]:
    """The names of `environ` that a child does not get, sorted."""
    return tuple(sorted(name for name in environ if is_removed(name, strip_all=strip_all)))


def is_removed(name: str, *, strip_all: bool = False) -> bool:
    if _LIMIT.fullmatch(name):
        return False
    if name in names.ROUTING_NAMES or name in names.SESSION_NAMES:
        return True
    if _ROUTING.fullmatch(name) or _TELEMETRY.fullmatch(name):
        return True
    vendor = _VENDOR_KEY.fullmatch(name)
    if vendor and vendor.group(1) in names.VENDOR_STEMS:
        return True
    return strip_all and _WORK.fullmatch(name) is not None


def without_proxy_for_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Both spellings of NO_PROXY, extended so that the way to a server on this machine passes no proxy."""
    listed = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    hosts = [host.strip() for host in listed.split(",") if host.strip()]
    value = ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])
    return {"NO_PROXY": value, "no_proxy": value}
