"""The verbs by name. A verb's module is imported when that verb runs, so help costs nothing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import click

from ascendrun import __version__


@dataclass(frozen=True)
class Verb:
    """`ascendrun.cli.commands.<module>` has the click command `command`."""

    name: str
    module: str
    says: str
    hidden: bool = False


VERBS = (
    Verb("submit", "submit", "Check a job file, start it on all its nodes, follow its output."),
    Verb("ps", "ps", "List jobs."),
    Verb("show", "show", "Show one job: nodes, ranks, story."),
    Verb("top", "top", "Show every NPU live: load, health, whose rank, what is slow."),
    Verb("logs", "logs", "Print or follow the output of a job's ranks."),
    Verb("events", "events", "Print what happened to jobs, in time; or follow it."),
    Verb("report", "report", "Write what a job did, where its time went, what it cost, as a page."),
    Verb("explain", "explain", "Name the rank that failed first, why, and what helps."),
    Verb("bundle", "bundle", "Pack a job's records and logs to hand on, without credentials."),
    Verb("stop", "stop", "Stop jobs, giving them time to save."),
    Verb("wait", "wait", "Wait until a job has ended; exit as it did."),
    Verb("validate", "validate", "Report every problem of job files."),
    Verb("schema", "schema", "Print the JSON Schema of job files, for editors."),
    Verb("init", "init", "Copy a job skeleton to begin with."),
    Verb("demo", "demo", "Show it all on two simulated nodes; needs no NPU."),
    Verb("sim", "sim", "Run a command on simulated NPUs: the real torch_npu, no NPU, no CANN."),
    Verb("doctor", "doctor", "Examine hosts: what differs, what is wrong, what helps."),
    Verb("env", "env", "Show what a rank would see on each host; secrets masked."),
    Verb("nodes", "nodes", "Ask hosts how they are."),
    Verb("exec", "exec", "Run a command on hosts; identical output is shown once."),
    Verb("trust", "trust", "Show and record the SSH host keys of hosts."),
    Verb("notify", "notify", "Show where notices go, and test it."),
    Verb("metrics", "metrics", "Serve what top shows to Prometheus, on this machine."),
    Verb("config", "config", "Show settings and where they come from."),
    Verb("completion", "completion", "Print shell completion for bash, zsh or fish."),
    Verb("controller", "controller", "The background loop that watches jobs.", hidden=True),
)
ALIASES = {"run": "submit", "ls": "ps", "kill": "stop", "cancel": "stop"}
BY_NAME = {verb.name: verb for verb in VERBS}


class LazyGroup(click.Group):
    """A group that knows its verbs' names and sentences without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb.name for verb in VERBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = BY_NAME.get(ALIASES.get(cmd_name, cmd_name))
        if verb is None:
            return None
        command = importlib.import_module(f"ascendrun.cli.commands.{verb.module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None:
            raise click.UsageError(f"there is no verb {name!r}{did_you_mean(name, [*BY_NAME, *ALIASES])}", ctx=ctx)
        return command.name, command, args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb.name, verb.says) for verb in VERBS if not verb.hidden])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        verbs = [verb for verb in VERBS if not verb.hidden and verb.name.startswith(incomplete)]
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(verb.name, help=verb.says) for verb in verbs]


def did_you_mean(word: str, known: list[str]) -> str:
    """ "; did you mean 'submit'?", or nothing when no known word is near."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    subcommand_metavar="VERB ...",
    epilog="`ascendrun VERB --help` shows each verb's options and examples.",
)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="Colour the output.  [default: auto]")
@click.option("--state-dir", metavar="DIR", help="Folder of the head's state.  [default: ~/.local/state/ascendrun]")
@click.version_option(__version__, prog_name="ascendrun", message="%(prog)s %(version)s")
@click.pass_obj
def cli(face: Any, color: str | None, state_dir: str | None) -> None:
    """Start, watch and repair distributed training on a cluster, from this machine, over plain SSH.

    \b
    ascendrun submit jobs/quickstart.yaml     start a job and follow it; ^C detaches
    ascendrun ps                              what runs
    ascendrun logs -f JOB                     follow again
    ascendrun stop JOB                        save, then stop
    """
    face.flags.update({name: value for name, value in (("color", color), ("state_dir", state_dir)) if value})
