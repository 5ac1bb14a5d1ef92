"""One place that lists the agents; a new one is a file of its own and a line here."""

from __future__ import annotations

from ftproviders.base import Provider
from ftproviders.claude import Claude
from ftproviders.codex import Codex
from ftproviders.openclaw import OpenClaw
from ftproviders.opencode import OpenCode

PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in (Claude(), Codex(), OpenCode(), OpenClaw())}
