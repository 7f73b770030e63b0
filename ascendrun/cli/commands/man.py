"""man: write the man pages."""

from __future__ import annotations

from pathlib import Path

import click

from ascendrun.cli.options import cli_command


@cli_command(
    "man",
    examples="""
    ascendrun man ~/.local/share/man/man1      # then: man ascendrun-submit
    ascendrun man --lang zh ~/.local/share/man/zh_CN/man1
""",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def command(directory: Path) -> int:
    """Write a man page for each command to DIRECTORY, in the chosen language."""
    from ascendrun.cli.reference import make_manuals

    directory.mkdir(parents=True, exist_ok=True)
    for name, page in make_manuals().items():
        (directory / name).write_text(page, encoding="utf-8")
        print(directory / name)
    return 0
