"""What `--dry-run` shows: everything a launch would do, with secrets masked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from ftproviders import AgentPlan

MASK = "***"
# A string member whose name ends like a secret's; references to a variable are none.
_SECRET_IN_JSON = re.compile(
    r'("[^"]*(?:key|token|secret|password|authorization)"\s*:\s*")((?!\{env:|\$\{)[^"]+)(")', re.IGNORECASE
)


def as_data(plan: AgentPlan, secrets: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    def masked(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, MASK)
        return _SECRET_IN_JSON.sub(rf"\g<1>{MASK}\g<3>", text)

    return {
        "env_set": {name: masked(value) for name, value in sorted(plan.env_set.items())},
        "env_removed": list(plan.env_remove),
        "files": {str(path): masked(text) for path, text in plan.files.items()},
        "files_if_missing": {str(path): masked(text) for path, text in plan.seeds.items()},
        "command": [masked(part) for part in plan.argv],
        "notes": [*notes, *plan.notes],
    }


def as_text(data: dict[str, Any]) -> str:
    def section(title: str, lines: Sequence[str]) -> str:
        return "\n".join([title, *(f"  {line}" for line in lines or ["(none)"])])

    files = {**data["files"], **data["files_if_missing"]}
    return "\n\n".join(
        [
            section("Environment set", [f"{name}={value}" for name, value in data["env_set"].items()]),
            section("Environment removed", data["env_removed"]),
            section("Files", [f"{path} ({len(text.encode())} bytes)" for path, text in files.items()]),
            section("Command", [shlex.join(data["command"])]),
            section("Notes", data["notes"]),
        ]
    )
