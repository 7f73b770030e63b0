"""Commands by name. A module is imported when its command runs, so that help stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

import click

from ascendrun import __version__
from ascendrun.cli.options import HELP_WIDTH, RENAMED_COMMANDS, CliCommand, UsageError, lang_option, translated_help
from ascendrun.text import Text, closest

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster


@dataclass(frozen=True)
class CommandEntry:
    """`ascendrun.cli.commands.<module>` has the click command, `command` or `<name>_command`."""

    name: str
    module: str
    summary: str
    hidden: bool = False

    @property
    def attribute(self) -> str:
        return "command" if self.name == self.module else f"{self.name}_command"


COMMANDS = (
    CommandEntry("submit", "submit", "Validate a job file, start the job, follow its output."),
    CommandEntry("plan", "submit", "Check a training before it starts; estimate memory, time and disk."),
    CommandEntry("ps", "ps", "List jobs."),
    CommandEntry("history", "ps", "List ended jobs and the device-hours that they used."),
    CommandEntry("sweep", "sweep", "Show the values and results of a sweep's jobs."),
    CommandEntry("show", "show", "Show one job: nodes, ranks, events."),
    CommandEntry("top", "top", "Show every NPU live: load, health, rank, stragglers."),
    CommandEntry("dashboard", "dashboard", "Serve jobs, nodes and logs to a browser, live."),
    CommandEntry("logs", "logs", "Print or follow the output of a job's ranks."),
    CommandEntry("events", "logs", "Print or follow the events of jobs."),
    CommandEntry("report", "report", "Write an HTML report of a job: training, time, cost."),
    CommandEntry("export", "report", "Write a job's metrics for TensorBoard, MLflow or a table."),
    CommandEntry("explain", "explain", "Find the first failing rank, the cause, the confidence and a fix."),
    CommandEntry("stacks", "explain", "Show what each rank of a running job does."),
    CommandEntry("shell", "fetch", "Open a shell next to a running rank."),
    CommandEntry("port", "port", "Reach a port of a rank's host from this machine."),
    CommandEntry("bundle", "fetch", "Pack the records and logs of a job without credentials."),
    CommandEntry("fetch", "fetch", "Fetch files that a job left on its nodes."),
    CommandEntry("cp", "fetch", "Copy files from hosts, or to hosts."),
    CommandEntry("stop", "stop", "Stop jobs after they have saved a checkpoint."),
    CommandEntry("retry", "stop", "Start the next attempt of a job that has ended."),
    CommandEntry("wait", "stop", "Wait until a job has ended; exit with its exit code."),
    CommandEntry("hold", "stop", "Keep queued jobs from starting."),
    CommandEntry("unhold", "stop", "Let held jobs start."),
    CommandEntry("validate", "job_files", "Report every problem of job files and hostfiles."),
    CommandEntry("schema", "job_files", "Print the JSON Schema of job files, or one key of it."),
    CommandEntry("init", "job_files", "Write a job file or hostfile from a template."),
    CommandEntry("demo", "demo", "Show the main features on two simulated nodes."),
    CommandEntry("sim", "demo", "Run a command on simulated NPUs with the real torch_npu."),
    CommandEntry("doctor", "doctor", "Check hosts: find differences, faults and fixes."),
    CommandEntry("verify", "verify", "Compare what ascendrun knows of NPUs with a real cluster."),
    CommandEntry("env", "doctor", "Show the environment of a rank on each host."),
    CommandEntry("nodes", "nodes", "Show whether hosts are reachable, and their resources."),
    CommandEntry("leases", "nodes", "List what uses devices and ports on hosts."),
    CommandEntry("release", "nodes", "State that no process of a job is left on hosts."),
    CommandEntry("drain", "nodes", "Close hosts to new jobs."),
    CommandEntry("undrain", "nodes", "Open drained or quarantined hosts again."),
    CommandEntry("lost", "nodes", "State that hosts are gone with all their processes."),
    CommandEntry("exec", "exec", "Run a command on hosts; identical output is printed once."),
    CommandEntry("rm", "config", "Remove ended jobs with all their files."),
    CommandEntry("prune", "config", "Remove old logs of ended jobs."),
    CommandEntry("trust", "nodes", "Show and record the SSH host keys of hosts."),
    CommandEntry("notify", "config", "Show the targets of notifications and test them."),
    CommandEntry("metrics", "top", "Export the data of top to Prometheus."),
    CommandEntry("config", "config", "Show settings and their origin."),
    CommandEntry("help", "help", "Print the help of a command, or a page of the documentation."),
    CommandEntry("completion", "completion", "Print shell completion for bash, zsh or fish."),
    CommandEntry("man", "completion", "Write the man pages to a directory."),
    CommandEntry("controller", "controller", "Run, query or stop the controller.", hidden=True),
)
HELP_EPILOG = (
    "`ascendrun help COMMAND` prints the options and examples of one command. `ascendrun help docs` lists the pages of "
    "the documentation."
)
ALIASES = {"run": "submit", "ls": "ps", "kill": "stop", "cancel": "stop", "describe": "show", "status": "show"}
BY_NAME = {entry.name: entry for entry in COMMANDS}


class LazyGroup(CliCommand, click.Group):
    """Group that knows the names and summaries of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = BY_NAME.get(ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command = getattr(importlib.import_module(f"ascendrun.cli.commands.{entry.module}"), entry.attribute)
        assert isinstance(command, click.Command)
        if ctx.resilient_parsing:
            add_completers(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        if command is None:
            meant = RENAMED_COMMANDS.get(args[0]) or closest(args[0], [*BY_NAME, *ALIASES])
            hint = "ascendrun --help" if meant is None else f"ascendrun {meant}"
            unknown = Text("cli.unknown-command", "unknown command {name:quote}", name=args[0])
            raise UsageError(unknown, hint=hint, ctx=ctx)
        return command.name, command, args[1:]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        CliCommand.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(str(Text("click.commands", "Commands"))):
            formatter.write_dl([(entry.name, summary_of(entry)) for entry in COMMANDS if not entry.hidden])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(str(Text("cli.help-epilog", HELP_EPILOG)))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(entry.name, help=summary_of(entry))
            for entry in COMMANDS
            if not entry.hidden and entry.name.startswith(incomplete)
        ]


def summary_of(entry: CommandEntry) -> str:
    """Return one line about a command, in the language of the process."""
    return translated_help(f"help.{entry.name}.summary", entry.summary)


@click.group(
    "ascendrun",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
    subcommand_metavar="COMMAND ...",
)
@click.option("--color", type=click.Choice(["auto", "always", "never"]), help="Color the output.  [default: auto]")
@click.option(
    "--state-dir",
    metavar="DIR",
    help="Directory with the state of the controller.  [default: ~/.local/state/ascendrun]",
)
@click.option("--head", metavar="HOST", help="Run the command on this host through ssh: user@host.")
@lang_option
@click.version_option(__version__, prog_name="ascendrun", message="%(prog)s %(version)s")
@click.pass_obj
def cli(ctx: Any, /, **flags: str | None) -> None:
    """Launch and monitor distributed training on an NPU cluster from this machine over SSH.

    \b
    ascendrun submit jobs/quickstart.yaml     submit a job and follow its output; ^C detaches
    ascendrun ps                              list live jobs
    ascendrun logs -f JOB                     follow the output again
    ascendrun stop JOB                        save a checkpoint, then stop
    """
    ctx.flags.update({name: value for name, value in flags.items() if value})


Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def add_completers(command: click.Command) -> None:
    """Complete the arguments and options of a command by their names."""
    for param in command.params:
        completer = _COMPLETERS.get(max(param.opts, key=len) if isinstance(param, click.Option) else str(param.name))
        if completer is None and command.name == "init" and param.name == "name":
            completer = _quiet(_templates)
        elif completer is None and command.name == "help" and param.name == "topic":
            completer = _quiet(_topics)
        if completer is not None:
            param._custom_shell_complete = completer  # set by click's own `shell_complete=`


def _quiet(values: Callable[[click.Context], Iterable[str]]) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [value for value in values(ctx) if value.startswith(incomplete)]
        except Exception:  # a shell that waits for a completion cannot show an error
            return []

    return complete


def _topics(ctx: click.Context) -> Iterable[str]:
    from ascendrun.carried import read_pages

    return [*BY_NAME, *read_pages()]


def _cluster(ctx: click.Context) -> Cluster:
    from ascendrun.cluster import Cluster

    return Cluster(state_dir=ctx.find_root().params.get("state_dir"))


def _jobs(ctx: click.Context) -> Iterable[str]:
    names = _cluster(ctx).jobs.names()
    return [*reversed(tuple(names)), *dict.fromkeys(names.values())]


def _hosts(ctx: click.Context) -> Iterable[str]:
    return [host.name for host in _cluster(ctx).hosts.select(hostfile=ctx.params.get("hostfile"))]


def _templates(ctx: click.Context) -> Iterable[str]:
    return [template.name for template in _cluster(ctx).job_files.templates()]


def _keys(ctx: click.Context) -> Iterable[str]:
    from ascendrun.core.jobfile.keys import explained_names
    from ascendrun.core.jobfile.spec import parse_program_options
    from ascendrun.planner.training import load_programs

    return explained_names(load_programs(parse_program_options))


_COMPLETERS = {
    "key": _quiet(_keys),
    "job": _quiet(_jobs),
    "jobs": _quiet(_jobs),
    "--job": _quiet(_jobs),
    "--resume": _quiet(_jobs),
    "hosts": _quiet(_hosts),
    "--hosts": _quiet(_hosts),
}
