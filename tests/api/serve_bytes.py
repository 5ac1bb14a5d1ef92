"""The real front (`ftengine.api.server.run`) with the byte dialect and the scripted engine.

    python tests/api/serve_bytes.py SETTINGS_JSON

Ends with status 3 and the sentence on standard error when the server refuses to start. What it hands on at its end is
in `end.json` in the model's folder.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftengine.api.server import run
from ftengine.api.settings import ServeSettings
from ftengine.errors import FtError
from tests.api.byte_dialect import open_bytes

ENGINE = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))


def at_end(folder: str, counters: dict[str, Any]) -> None:
    (Path(folder) / "end.json").write_bytes(msgspec.json.encode(counters))


if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=ServeSettings)
    hand_on = partial(at_end, settings.model_dir)
    try:
        sys.exit(run(settings, engine_command=ENGINE, language=open_bytes, at_end=hand_on))
    except FtError as error:
        print(f"{type(error).__name__}: {error} [{error.next_step}]", file=sys.stderr)
        sys.exit(3)
