"""`python -m ftlaunch.machine.child PROBE ASKED`: one probe in a process of its own, which may hang or crash.

Each finding is a line of JSON on the standard output as soon as it is known, so that those before a hanging call are
not lost.
"""

from __future__ import annotations

import json
import os
import sys

from ftlaunch.machine.probe import BY_NAME, Asked
from ftlaunch.machine.process import own_output


def main() -> int:
    name, asked = sys.argv[1:]
    out = own_output()
    for finding in BY_NAME[name].run(Asked.from_json(asked)):
        out.write(json.dumps(finding.as_json()) + "\n")
        out.flush()
    out.close()
    return 0


if __name__ == "__main__":
    # Libraries of a driver that is out of order may also hang in what they do at exit.
    status = main()
    os._exit(status)
