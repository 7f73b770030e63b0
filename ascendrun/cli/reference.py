"""The reference of the command line, made from the commands: docs/cli.md, and the pages of `ascendrun man`.

`python -m ascendrun.cli.reference docs/cli.md` writes the page.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from ascendrun import __version__
from ascendrun.cli.app import ALIASES, COMMANDS, CommandEntry, cli, summary_of
from ascendrun.cli.command import CliCommand, option_help, translated_help
from ascendrun.text import Text

HEAD = """# Command-line reference

This page lists every command, option and example of `ascendrun`. It is generated from the commands; `ascendrun help
COMMAND` prints the same. Global options are accepted before a command, `--lang` also after it. [Exit
codes](exit-codes.md) are the same for all commands.
"""


def make_page() -> str:
    """Return docs/cli.md."""
    parts = [HEAD, "## ascendrun\n", _block(_usage(cli, "ascendrun")), _options_table(cli)]
    for command in visible_commands():
        parts += _section(command)
    return "\n".join(parts)


def visible_commands() -> tuple[CliCommand, ...]:
    context = click.Context(cli, info_name="ascendrun")
    found = [cli.get_command(context, entry.name) for entry in _listed()]
    return tuple(command for command in found if isinstance(command, CliCommand))


def make_manuals() -> Mapping[str, str]:
    """Return man pages in troff, by file name."""
    pages = {"ascendrun.1": _manual(cli, "ascendrun")}
    for command in visible_commands():
        pages[f"ascendrun-{command.name}.1"] = _manual(command, f"ascendrun {command.name}")
    return pages


def _section(command: CliCommand) -> Iterator[str]:
    aliases = [alias for alias, name in ALIASES.items() if name == command.name]
    yield f"## {command.name}\n"
    yield f"{_description(command)}\n"
    if aliases:
        yield f"Aliases: {', '.join(f'`{alias}`' for alias in aliases)}.\n"
    yield _block(_usage(command, f"ascendrun {command.name}"))
    yield _options_table(command)
    yield _block(command.examples)


def _description(command: click.Command) -> str:
    text = translated_help(f"help.{command.name}", inspect.cleandoc(command.help or ""))
    return text.partition("\b")[0].strip()


def _usage(command: click.Command, path: str) -> str:
    return " ".join([path, *command.collect_usage_pieces(_context(command))])


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    for param in command.get_params(_context(command)):
        if isinstance(param, click.Option) and not param.hidden:
            flags = ", ".join(sorted((*param.opts, *param.secondary_opts), key=len))
            value = "" if param.is_flag else f" {metavar_of(param, command)}"
            yield flags + value, option_help(command.name or "", param) or ""


def metavar_of(param: click.Parameter, command: click.Command) -> str:
    """Return the placeholder of an option's value; click before 8.2 accepts no context."""
    try:
        return param.make_metavar(_context(command))
    except TypeError:
        return param.make_metavar()  # type: ignore[call-arg]


def _context(command: click.Command) -> click.Context:
    return click.Context(command, info_name=command.name, **command.context_settings)


def _options_table(command: click.Command) -> str:
    rows = [" | ".join(cell.replace("|", "\\|") for cell in (f"`{flags}`", text)) for flags, text in _options(command)]
    return "| option | meaning |\n|---|---|\n" + "".join(f"| {row} |\n" for row in rows)


def _block(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _manual(command: CliCommand | click.Command, path: str) -> str:
    name = path.replace(" ", "-")
    entry = next((entry for entry in COMMANDS if entry.name == command.name), None)
    summary = summary_of(entry) if entry else _description(cli)
    sections = [
        (Text("man.name", "Name"), f"{_troff(name)} \\- {_troff(summary.rstrip('.。'))}"),
        (Text("man.synopsis", "Synopsis"), _troff(_usage(command, path))),
        (Text("man.description", "Description"), _troff(_description(command))),
        (Text("click.options", "Options"), _items((_troff(flags), text) for flags, text in _options(command))),
    ]
    if command is cli:
        pages = ((f"{_troff(f'ascendrun-{entry.name}')}(1)", summary_of(entry)) for entry in _listed())
        sections.append((Text("click.commands", "Commands"), _items(pages)))
    else:
        examples = translated_help(f"help.{command.name}.examples", getattr(command, "examples", ""))
        sections.append((Text("cli.examples", "Examples"), f".nf\n{_troff(examples)}\n.fi"))
        sections.append((Text("man.see-also", "See also"), ".BR ascendrun (1)"))
    head = f'.TH "{name.upper()}" "1" "" "ascendrun {__version__}"\n'
    return head + "".join(f".SH {str(title).upper()}\n{body}\n" for title, body in sections)


def _items(items: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f".TP\n.B {name}\n{_troff(text)}" for name, text in items)


def _listed() -> Iterator[CommandEntry]:
    """Yield every command that --help lists."""
    return (entry for entry in COMMANDS if not entry.hidden)


def _troff(text: str) -> str:
    """Escape text, so that troff finds neither a request nor an escape."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines())


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    Path(arguments[0]).write_text(make_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
