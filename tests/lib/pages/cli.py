"""docs/cli.md."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ascendrun.cli.app import ALIASES, cli
from ascendrun.cli.commands.completion import description_of, options_of, usage_of, visible_commands
from ascendrun.cli.options import CliCommand

HEAD = """# Command-line reference

This page lists every command, option and example of `ascendrun`. It is generated from the commands; `ascendrun help
COMMAND` prints the same. Global options are accepted before a command, `--lang` also after it. [Exit
codes](exit-codes.md) are the same for all commands.
"""


def render_page() -> str:
    parts = [HEAD, "## ascendrun\n", _block(usage_of(cli, "ascendrun")), _options_table(cli)]
    for command in visible_commands():
        parts += _section(command)
    return "\n".join(parts)


def _section(command: CliCommand) -> Iterator[str]:
    aliases = [alias for alias, name in ALIASES.items() if name == command.name]
    yield f"## {command.name}\n"
    yield f"{description_of(command)}\n"
    if aliases:
        yield f"Aliases: {', '.join(f'`{alias}`' for alias in aliases)}.\n"
    yield _block(usage_of(command, f"ascendrun {command.name}"))
    yield _options_table(command)
    yield _block(command.examples)


def _options_table(command: click.Command) -> str:
    rows = [
        " | ".join(cell.replace("|", "\\|") for cell in (f"`{flags}`", text)) for flags, text in options_of(command)
    ]
    return "| option | meaning |\n|---|---|\n" + "".join(f"| {row} |\n" for row in rows)


def _block(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())
