"""`python -m ftlaunch.machine.child PROBE ASKED`: one probe in a process of its own, which may hang or crash.

Each finding is a line of JSON on the standard output as soon as it is known, so that those before a hanging call are
not lost. What libraries print themselves goes nowhere.
"""

from __future__ import annotations

import json
import os
import sys

from ftlaunch.machine.probe import BY_NAME, Asked


def main() -> int:
    from ftengine.memory.driver import end_with_parent

    end_with_parent()
    name, asked = sys.argv[1:]
    # 1 is taken away from the libraries of drivers before any of them is loaded.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    for finding in BY_NAME[name].run(Asked.from_json(asked)):
        out.write(json.dumps(finding.as_json()) + "\n")
        out.flush()
    out.close()
    return 0


if __name__ == "__main__":
    # Libraries of a driver that is out of order may also hang in what they do at exit.
    status = main()
    os._exit(status)
