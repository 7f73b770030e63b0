"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.command import cli_command as cli_command
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.names import split_list
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.core.hosts import Host

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "csv")
DURATION = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|d)?$")
HOSTS_HELP = "Only these hosts: npu[01-04] or @group."
SET_HELP = "Override the job file: args.lr=1e-4."
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def output_option(command: Command) -> Command:
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), help="Choose the output format.  [default: table]"
    )(command)


def list_output_option(command: Command) -> Command:
    """As `output_option`, for lists whose rows have an id: `-o name` prints the ids."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice([*FORMATS, "name"]),
        help="Choose the output format; name: ids only.  [default: table]",
    )(command)


def hostfile_option(command: Command) -> Command:
    return click.option("--hostfile", "-H", metavar="FILE", help="Read hosts from this file.")(command)


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer click only
    """A duration: 10m, 90s, 2h, 1.5d or plain seconds, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, float):
            return value
        seconds = parse_duration(str(value))
        if seconds is None:
            text = Text(
                "cli.bad-duration", "expected a duration such as 90s, 10m, 2h or 1d, got {value:quote}", value=value
            )
            self.fail(str(text), param, ctx)
        return seconds


def parse_duration(text: str) -> float | None:
    """Return seconds, or None when the text is not a duration."""
    match = DURATION.match(text.strip())
    return float(match.group(1)) * SECONDS[match.group(2)] if match else None


def parse_since(text: str, *, now_s: float) -> float:
    """Return UTC seconds of "10m" (ago) or of a time: 2026-11-20T10:00, 10:00 (today), with Z or an offset or local.

    Raises ValueError with a message.
    """
    seconds = parse_duration(text)
    if seconds is not None:
        return now_s - seconds
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
