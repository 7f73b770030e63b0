"""Classes of commands, and the options that several of them share.

English help is next to the code: the docstring with its examples, `help=` of each option. Chinese is read when help is
rendered, under derived keys: `help.COMMAND`, `help.COMMAND.--option`, `help.COMMAND.examples`; help of shared options
under `help.--option`.
"""

from __future__ import annotations

import copy
import inspect
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import click

from ascendrun import text
from ascendrun.cli.elsewhere import RUN_HERE, WORDS, run_elsewhere
from ascendrun.cli.errors import UsageError as UsageError
from ascendrun.cli.errors import exclusive as exclusive
from ascendrun.core.hosts import Host, parse_hostfile
from ascendrun.core.names import split_list
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "csv")
DURATION = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d)?$")
HOSTS_HELP = "Only these hosts: npu[01-04] or @group."
SET_HELP = "Override the job file: args.lr=1e-4."
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


engine_option = click.option("--engine", metavar="NAME", help="Run on this engine of the settings.")
hostfile_option = click.option("--hostfile", "-H", metavar="FILE", help="Read hosts from this file.")
output_option = click.option(
    "-o", "--output", type=click.Choice(FORMATS), help="Choose the output format.  [default: table]"
)
list_output_option = click.option(
    "-o",
    "--output",
    type=click.Choice([*FORMATS, "name"]),
    help="Choose the output format; name: ids only.  [default: table]",
)
"""As `output_option`, for lists whose rows have an id: `-o name` prints the ids."""


def check_alone(flag: str, others: Mapping[str, bool]) -> None:
    """Raise UsageError for the first other flag that is given too."""
    for other, is_given in others.items():
        if is_given:
            raise UsageError(exclusive(flag, other))


class Parsed(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer click only
    """What `parse` makes of the text of an option; it raises ValueError with a message. `name`: in the help."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_duration(text: str) -> float:
    """Return the seconds of 10m, 90s, 2h, 1.5d or plain seconds."""
    match = DURATION.match(text.strip())
    if match is None:
        expected = "expected a duration such as 90s, 10m, 2h or 1d, got {value:quote}"
        raise ValueError(str(Text("cli.bad-duration", expected, value=text)))
    return float(match.group(1)) * SECONDS[match.group(2)]


def parse_since(text: str) -> float:
    """Return UTC seconds of "10m" (ago) or of a time: 2026-11-20T10:00, 10:00 (today), with Z or an offset or local."""
    now_s = time.time()
    if DURATION.match(text.strip()):
        return now_s - parse_duration(text)
    clock = re.match(r"^(\d{1,2}):(\d{2})(?::(\d{2}))?$", text)
    try:
        if clock:
            hour, minute, second = (int(part or 0) for part in clock.groups())
            today = datetime.fromtimestamp(now_s)
            return today.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
        return datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        wrong = Text("cli.bad-time", "expected 10m, 10:30 or 2026-11-20T10:30, got {value:quote}", value=text)
        raise ValueError(str(wrong)) from None


def parse_future(text: str) -> float:
    """Return UTC seconds of "2h" (from now) or of a time, as `parse_since`; 10:00: the next."""
    now_s = time.time()
    if DURATION.match(text.strip()):
        return now_s + parse_duration(text)
    at_s = parse_since(text)
    return at_s + 86_400 if at_s < now_s and len(text) <= len("10:00:00") else at_s


DURATIONS, TIMES, FUTURE = Parsed("time", parse_duration), Parsed("time", parse_since), Parsed("time", parse_future)


def hosts_of(ctx: CliContext, *, hostfile: str | None, names: str | None = None) -> tuple[Host, ...]:
    """Return the hosts of `hostfile`, or of that setting; with `names` only those, `npu[01-04]` or `@group`.

    With names but no file anywhere, the names themselves are the hosts. Raises InvalidInputError, NotFoundError,
    UsageError.
    """
    if hostfile is None and ctx.settings.hostfile is None:
        if names is None:
            raise UsageError.of("cli.no-hosts", "no hosts given", "add --hostfile FILE or the names of hosts")
        return parse_host_names([names])
    return ctx.cluster.hosts.select(names, hostfile=hostfile)


def parse_host_names(arguments: list[str]) -> tuple[Host, ...]:
    """Return the hosts of arguments: `npu[01-04],gw user@10.0.0.3`. Raises InvalidInputError with the argument."""
    for argument in arguments:
        if ("/" in argument or argument.endswith(".hosts")) and Path(argument).is_file():
            message = Text("cli.file-not-host", "{path} is a file, not a host", path=argument)
            raise UsageError(message, hint=Text("cli.use-hostfile", "use --hostfile {path}", path=argument))
    pieces = [piece.strip() for argument in arguments for piece in split_list(argument)]
    return parse_hostfile("\n".join(piece for piece in pieces if piece), "HOSTS")


@dataclass(frozen=True)
class Target:
    """Target of `doctor` and `env`: the hosts of a job, or other named hosts."""

    file: Path | None
    hostfile: str | None
    names: str | None
    overrides: tuple[str, ...]

    def hosts(self, ctx: CliContext) -> tuple[Host, ...]:
        """Return the hosts of the job, unless others are named."""
        if self.file is None or self.hostfile is not None or self.names is not None:
            return hosts_of(ctx, hostfile=self.hostfile, names=self.names)
        return ctx.cluster.job_files.hosts(self.file, overrides=self.overrides)


def target_options(command: Command) -> Command:
    """Add FILE, --hostfile, --hosts and --set; the command gets them as `target`."""

    @wraps(command)
    def with_target(
        *args: Any,
        file: Path | None,
        hostfile: str | None,
        names: str | None,
        overrides: tuple[str, ...],
        **options: Any,
    ) -> Any:
        return command(*args, target=Target(file, hostfile, names, overrides), **options)

    for option in (
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP),
        click.option("--hosts", "names", metavar="HOSTS", help=HOSTS_HELP),
        hostfile_option,
        click.argument("file", required=False, type=click.Path(path_type=Path)),
    ):
        with_target = option(with_target)
    return with_target  # type: ignore[return-value]


RENAMED_COMMANDS: Mapping[str, str] = {"list": "ps", "log": "logs", "check": "doctor", "delete": "rm"}
"""Usual names of other tools for a command."""
LANG_HELP = "Language of everything printed.  [default: that of the locale]"
HELP_WIDTH = 110


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, on another machine if that one has the store or is the head."""
        if ctx.parent is not None and self.name not in RUN_HERE:
            code = run_elsewhere(ctx)
            if code is not None:
                return code
        return super().invoke(ctx)

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


def cli_command(name: str, *, takes_command: bool = False) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a click command of a function whose first argument is the context. Its docstring is the help, with examples
    after a line `Examples:`; it returns the exit code, None: 0. `takes_command`: options end at the first argument."""

    def make(function: Callable[..., Any]) -> click.Command:
        help_text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\nExamples:\n")
        made = click.command(
            name,
            cls=CliCommand,
            help=help_text.rstrip(),
            context_settings={
                "help_option_names": ["-h", "--help"],
                "max_content_width": HELP_WIDTH,
                "allow_interspersed_args": not takes_command,
            },
        )(click.pass_obj(function))
        made.examples = examples
        return lang_option(made)  # shared options are last in the help

    return make


lang_option = click.option("--lang", type=click.Choice(text.LANGUAGES), expose_value=False, help=LANG_HELP)
"""`--lang` was read before all other options: here it is only accepted and checked."""
