"""Base class of commands: help in two languages with examples at its end, `--lang` everywhere.

English help is next to the code: the docstring, `help=` of each option, `examples=`. Chinese is read when help is
rendered, under derived keys: `help.COMMAND`, `help.COMMAND.--option`, `help.COMMAND.examples`; help of shared options
under `help.--option`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Callable

import click

from ascendrun import text
from ascendrun.text import Text

RENAMED_COMMANDS: Mapping[str, str] = {"list": "ps", "log": "logs", "check": "doctor"}
"""Usual names of other tools for a command."""
LANG_HELP = "Language of everything printed.  [default: that of the locale]"
HELP_WIDTH = 110


class UsageError(click.UsageError):
    """An invalid command line: exit code 2. `hint`: None: the command that prints the help."""

    def __init__(self, message: Text, *, hint: Text | str | None = None, ctx: click.Context | None = None) -> None:
        super().__init__(str(message), ctx)
        self.text, self.hint = message, hint

    @classmethod
    def of(cls, key: str, english: str, hint: str | None = None, /, **values: Any) -> UsageError:
        """Make an error as `AscendrunError.of`."""
        return cls(Text(key, english, **values), hint=None if hint is None else Text(f"{key}.hint", hint, **values))


def exclusive(one: str, other: str) -> Text:
    """Return the message that two flags exclude each other."""
    return Text("cli.exclusive", "{one} cannot be combined with {other}", one=one, other=other)


class HelpFormatter(click.HelpFormatter):
    """Help formatter; headings end with the colon of the language."""

    def write_heading(self, heading: str) -> None:
        colon = "：" if text.language() == "zh" else ":"
        self.write(f"{'':>{self.current_indent}}{heading}{colon}\n")


class HelpContext(click.Context):
    """The context of one command line."""

    formatter_class = HelpFormatter


class CliCommand(click.Command):
    """A command. `examples`: the lines at the end of its help."""

    context_class = HelpContext
    examples = ""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(translated_help(f"help.{self.name}", inspect.cleandoc(self.help or "")))

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return a new option each time: click keeps an option whose text is in the language of the first call."""
        self._help_option = None
        return super().get_help_option(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [record for record in (self._record(ctx, param) for param in self.get_params(ctx)) if record]
        with formatter.section(str(Text("click.options", "Options"))):
            formatter.write_dl(records)

    def _record(self, ctx: click.Context, param: click.Parameter) -> tuple[str, str] | None:
        shown = copy.copy(param)
        if isinstance(shown, click.Option):
            shown.help = option_help(self.name or "", shown)
        return None if isinstance(shown, click.Argument) else shown.get_help_record(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.examples:
            return
        formatter.write_paragraph()
        with formatter.section(str(Text("cli.examples", "Examples"))):
            for line in translated_help(f"help.{self.name}.examples", self.examples).splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def translated_help(key: str, english: str) -> str:
    """Return a help text in the language of the process."""
    return text.template_of(key, english, text.language())


def option_help(command: str, option: click.Option) -> str | None:
    """Return the help of one option in the language of the process; by its own key, or the shared key."""
    if option.help is None:
        return None
    flag = max(option.opts, key=len)
    own = translated_help(f"help.{command}.{flag}", option.help)
    return own if own != option.help else translated_help(f"help.{flag}", option.help)


def cli_command(
    name: str, *, examples: str, takes_command: bool = False
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command with examples, one per line. `takes_command`: options end at the first argument."""

    def make(function: Callable[..., Any]) -> click.Command:
        params: list[click.Parameter] = getattr(function, "__click_params__", [])
        has_lang = any(param.name == "lang" for param in params)
        if not has_lang:
            function = lang_option(function)
        made = click.command(
            name,
            cls=CliCommand,
            context_settings={
                "help_option_names": ["-h", "--help"],
                "max_content_width": HELP_WIDTH,
                "allow_interspersed_args": not takes_command,
            },
        )(function)
        if not has_lang:
            made.params.append(made.params.pop(0))  # shared options are last in the help
        made.examples = inspect.cleandoc(examples)
        return made

    return make


def lang_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--lang`, which was read before all other options: here it is only accepted and checked."""
    return click.option("--lang", type=click.Choice(text.LANGUAGES), expose_value=False, help=LANG_HELP)(function)
