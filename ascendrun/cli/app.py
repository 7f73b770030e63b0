"""The commands by name. A module is imported when its command runs, so that help stays fast."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import click

from ascendrun import __version__


@dataclass(frozen=True)
class CommandEntry:
    """`ascendrun.cli.commands.<module>` has the click command `command`."""

    name: str
    module: str
    summary: str
    hidden: bool = False


COMMANDS = (
    CommandEntry("submit", "submit", "Check a job file, start it on all its nodes, follow its output."),
    CommandEntry("ps", "ps", "List jobs."),
    CommandEntry("show", "show", "Show one job: nodes, ranks, story."),
    CommandEntry("top", "top", "Show every NPU live: load, health, whose rank, what is slow."),
    CommandEntry("logs", "logs", "Print or follow the output of a job's ranks."),
    CommandEntry("events", "events", "Print what happened to jobs, in time; or follow it."),
    CommandEntry("report", "report", "Write what a job did, where its time went, what it cost, as a page."),
    CommandEntry("explain", "explain", "Name the rank that failed first, why, and what helps."),
    CommandEntry("bundle", "bundle", "Pack a job's records and logs to hand on, without credentials."),
    CommandEntry("stop", "stop", "Stop jobs, giving them time to save."),
    CommandEntry("wait", "wait", "Wait until a job has ended; exit as it did."),
    CommandEntry("validate", "validate", "Report every problem of job files."),
    CommandEntry("schema", "schema", "Print the JSON Schema of job files, for editors."),
    CommandEntry("init", "init", "Copy a job skeleton to begin with."),
    CommandEntry("demo", "demo", "Show it all on two simulated nodes; needs no NPU."),
    CommandEntry("sim", "sim", "Run a command on simulated NPUs: the real torch_npu, no NPU, no CANN."),
    CommandEntry("doctor", "doctor", "Examine hosts: what differs, what is wrong, what helps."),
    CommandEntry("env", "env", "Show what a rank would see on each host; secrets masked."),
    CommandEntry("nodes", "nodes", "Ask hosts how they are."),
    CommandEntry("exec", "exec", "Run a command on hosts; identical output is shown once."),
    CommandEntry("trust", "trust", "Show and record the SSH host keys of hosts."),
    CommandEntry("notify", "notify", "Show where notices go, and test it."),
    CommandEntry("metrics", "metrics", "Serve what top shows to Prometheus, on this machine."),
    CommandEntry("config", "config", "Show settings and where they come from."),
    CommandEntry("completion", "completion", "Print shell completion for bash, zsh or fish."),
    CommandEntry("controller", "controller", "The background loop that watches jobs.", hidden=True),
)
ALIASES = {"run": "submit", "ls": "ps", "kill": "stop", "cancel": "stop"}
BY_NAME = {entry.name: entry for entry in COMMANDS}


class LazyGroup(click.Group):
    """Group that knows the names and summaries of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = BY_NAME.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command = importlib.import_module(f"ascendrun.cli.commands.{entry.module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None:
            raise click.UsageError(f"unknown command {name!r}{did_you_mean(name, [*BY_NAME, *ALIASES])}", ctx=ctx)
        return command.name, command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS if not entry.hidden])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        entries = [entry for entry in COMMANDS if not entry.hidden and entry.name.startswith(incomplete)]
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(entry.name, help=entry.summary) for entry in entries]


def did_you_mean(word: str, known: list[str]) -> str:
    """ "; did you mean 'submit'?", or nothing when no known word is near."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    subcommand_metavar="COMMAND ...",
    epilog="`ascendrun COMMAND --help` shows each command's options and examples.",
)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="Colour the output.  [default: auto]")
@click.option("--state-dir", metavar="DIR", help="Folder of the head's state.  [default: ~/.local/state/ascendrun]")
@click.version_option(__version__, prog_name="ascendrun", message="%(prog)s %(version)s")
@click.pass_obj
def cli(ctx: Any, color: str | None, state_dir: str | None) -> None:
    """Start, watch and repair distributed training on a cluster, from this machine, over plain SSH.

    \b
    ascendrun submit jobs/quickstart.yaml     start a job and follow it; ^C detaches
    ascendrun ps                              what runs
    ascendrun logs -f JOB                     follow again
    ascendrun stop JOB                        save, then stop
    """
    ctx.flags.update({name: value for name, value in (("color", color), ("state_dir", state_dir)) if value})
