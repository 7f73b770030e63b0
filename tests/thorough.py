"""How much is tried by chance: little in every run, much with --thorough."""

import os

THOROUGH_VARIABLE = "TESTS_ARE_THOROUGH"


def examples(usual: int, thorough: int) -> int:
    return thorough if THOROUGH_VARIABLE in os.environ else usual
