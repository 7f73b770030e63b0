"""Models that files are read as."""

import subprocess
import sys


def test_a_model_that_is_made_while_another_one_is_made_takes_nothing_from_it() -> None:
    """As threads do: the first job, and the engines of the settings."""
    code = """
from ascendrun.core.reader.strict import Strict

class Nests(Strict):
    @classmethod
    def __pydantic_init_subclass__(cls, **options):
        if cls.__name__ == "Outer":
            class Inner(Strict):
                x: int
        super().__pydantic_init_subclass__(**options)

class Outer(Nests):
    x: int

print(Outer(x=1).x)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr
