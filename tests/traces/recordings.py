"""The requests that the real agents were seen to send, where they lie beside the repository."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared"
TRACES = SHARED / "traces"
TOKENIZER = SHARED / "tokenizers" / "qwen3.6"


@dataclass(frozen=True)
class Recording:
    name: str  # client/scenario/number
    method: str
    path: str  # with its query
    headers: dict[str, str]
    body: dict[str, Any] | None

    @property
    def client(self) -> str:
        return self.name.split("/")[0]

    @property
    def route(self) -> str:
        return self.path.partition("?")[0]


def recordings(scenario: str = "*") -> list[Recording]:
    """All recorded requests, in the order they were sent within a scenario; none where there are no traces."""
    return [_read(path) for path in sorted(TRACES.glob(f"*/{scenario}/*.json*"))]


def _read(path: Path) -> Recording:
    raw = path.read_bytes()
    form = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    query = f"?{form['query']}" if form["query"] else ""
    return Recording(
        name=str(path.relative_to(TRACES)).split(".json")[0],
        method=form["method"],
        path=form["path"] + query,
        headers=form["headers"],
        body=form["body"],
    )
