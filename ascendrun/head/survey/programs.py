"""The door to the bundled programs' option tables; the programs themselves are never imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.options import ProgramOptions

OPTIONS_FILE = "options.json"


def load_programs() -> Mapping[str, ProgramOptions]:
    """Every bundled program by name. Raises InvalidInputError when a table of ours is broken."""
    programs: dict[str, ProgramOptions] = {}
    for folder in sorted(resources.files("ascendrun").joinpath("programs").iterdir(), key=lambda each: each.name):
        table = folder.joinpath(OPTIONS_FILE)
        if folder.is_dir() and table.is_file():
            programs[folder.name] = parse_program_options(folder.name, table.read_text(encoding="utf-8"))
    return programs
