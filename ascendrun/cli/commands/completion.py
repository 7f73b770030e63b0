"""completion, man: print the completion script of a shell; write the man pages."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ascendrun.cli import COMPLETE_VARIABLE, PROGRAM
from ascendrun.cli.app import cli
from ascendrun.cli.manuals import make_manuals
from ascendrun.cli.options import cli_command


@cli_command(
    "completion",
    examples="""
    source <(ascendrun completion bash)                                   # in ~/.bashrc
    ascendrun completion fish > ~/.config/fish/completions/ascendrun.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell: commands, options, jobs, hosts, templates."""
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(cli, {}, PROGRAM, COMPLETE_VARIABLE).source())
    return 0


@cli_command(
    "man",
    examples="""
    ascendrun man ~/.local/share/man/man1      # then: man ascendrun-submit
    ascendrun man --lang zh ~/.local/share/man/zh_CN/man1
""",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def man_command(directory: Path) -> int:
    """Write a man page for each command to DIRECTORY, in the chosen language."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in make_manuals().items():
        (directory / name).write_text(page, encoding="utf-8")
        print(directory / name)
    return 0
