"""A port for a test is given once, to whichever process asks."""

import random
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

ASK = "import random; from tests.ports import free_port; random.seed(1); print(free_port())"


def test_no_port_is_given_twice_here_or_to_another_process() -> None:
    given = []
    for _ in range(2):
        random.seed(1)
        given.append(free_port())
    command = [sys.executable, "-c", ASK]
    other = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=True, text=True)
    assert len({*given, int(other.stdout)}) == 3
