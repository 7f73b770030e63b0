"""Runs commands where it stands and times them: a JSON object a line on stdin, one a line back on stdout.

It is started once on the head, so that no measured command pays for entering the head's namespaces.
Stands alone (no import of ours): it starts in milliseconds and weighs nothing in the head's CPU time.

    {"argv": […], "env": {…}, "timeout_s": 60}  ->  {"wall_s": 0.28, "status": 0, "tail": "the output's end"}
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

TAIL_BYTES = 2000


def time_command(argv: list[str], env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    """`status`: the exit code, or minus the signal's number; a command that ran past `timeout_s` is killed: -9.

    What the command leaves running (a controller, a ControlMaster) may keep its output open: a file, not a pipe.
    """
    with tempfile.TemporaryFile() as output:
        began_s = time.perf_counter()
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        status = child.wait()  # without a timeout of its own, which would poll every 50 ms
        wall_s = time.perf_counter() - began_s
        signal.setitimer(signal.ITIMER_REAL, 0)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - TAIL_BYTES))
        return {"wall_s": wall_s, "status": status, "tail": output.read().decode("utf-8", "replace")}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = time_command(asked["argv"], asked["env"], asked["timeout_s"])
        except OSError as error:
            answer = {"wall_s": 0.0, "status": 127, "tail": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
