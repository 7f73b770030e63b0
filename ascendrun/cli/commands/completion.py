"""completion, man: print the completion script of a shell; write the man pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from ascendrun import __version__
from ascendrun.cli import COMPLETE_VARIABLE, PROGRAM
from ascendrun.cli.app import COMMANDS, CommandEntry, cli, summary_of
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import CliCommand, cli_command, option_help, translated_help
from ascendrun.text import Text


@cli_command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(ctx: CliContext, shell: str) -> None:
    """Print the completion script of a shell: commands, options, jobs, hosts, templates.

    Examples:
    source <(ascendrun completion bash)                                   # in ~/.bashrc
    ascendrun completion fish > ~/.config/fish/completions/ascendrun.fish
    """
    maker = get_completion_class(shell)
    assert maker is not None
    click.echo(maker(cli, {}, PROGRAM, COMPLETE_VARIABLE).source())


@cli_command("man")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def man_command(ctx: CliContext, directory: Path) -> None:
    """Write a man page for each command to DIRECTORY, in the chosen language.

    Examples:
    ascendrun man ~/.local/share/man/man1      # then: man ascendrun-submit
    ascendrun man --lang zh ~/.local/share/man/zh_CN/man1
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in make_manuals().items():
        (directory / name).write_text(page, encoding="utf-8")
        print(directory / name)


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


def description_of(command: click.Command) -> str:
    text = translated_help(f"help.{command.name}", inspect.cleandoc(command.help or ""))
    return text.partition("\b")[0].strip()


def usage_of(command: click.Command, path: str) -> str:
    return " ".join([path, *command.collect_usage_pieces(_context(command))])


def options_of(command: click.Command) -> Iterator[tuple[str, str]]:
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


def _manual(command: CliCommand | click.Command, path: str) -> str:
    name = path.replace(" ", "-")
    entry = next((entry for entry in COMMANDS if entry.name == command.name), None)
    summary = summary_of(entry) if entry else description_of(cli)
    sections = [
        (Text("man.name", "Name"), f"{_troff(name)} \\- {_troff(summary.rstrip('.。'))}"),
        (Text("man.synopsis", "Synopsis"), _troff(usage_of(command, path))),
        (Text("man.description", "Description"), _troff(description_of(command))),
        (Text("click.options", "Options"), _items((_troff(flags), text) for flags, text in options_of(command))),
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
