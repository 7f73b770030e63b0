"""config, notify: settings, their origin, targets of notifications. prune, rm: remove data of ended jobs."""

from __future__ import annotations

import click

from ascendrun.cli.commands.sweep import jobs_of
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import DURATIONS, UsageError, check_alone, cli_command, output_option
from ascendrun.cli.output import (
    PEOPLE,
    Column,
    describe_memory,
    describe_time,
    print_for_programs,
    print_rows,
    sanitise_line,
)
from ascendrun.cluster import PruneReply, SettingView
from ascendrun.text import Text, suggestion

DEFAULT = Text("config.default", "default")


@cli_command("config")
@click.argument("action", type=click.Choice(["list", "get"]), default="list")
@click.argument("name", required=False)
@output_option
def command(ctx: CliContext, action: str, name: str | None, output: str | None) -> None:
    """Show settings: flag > $ASCENDRUN_… > ~/.config/ascendrun/config.yaml > /etc/ascendrun/config.yaml > default.

    Examples:
    ascendrun config                         # every setting and where it comes from
    ascendrun config get state_dir
    ASCENDRUN_COLOR=never ascendrun config list -o json
    """
    views = ctx.cluster.config()
    if action == "list":
        if name is not None:
            raise UsageError(
                Text("config.extra-name", "`config list` cannot be combined with a name"),
                hint=f"ascendrun config get {name}",
            )
        columns = [
            Column("NAME", lambda view: view.name),
            Column("VALUE", lambda view: "-" if view.value is None else view.value),
            Column("ORIGIN", lambda view: str(DEFAULT) if view.origin == "default" else view.origin),
            Column("MEANING", lambda view: str(view.meaning)),
        ]
        print_rows(views, columns, output, name="settings", kind=SettingView)
        return
    if name is None:
        raise UsageError.of("config.no-name", "`config get` requires a name", "list settings: ascendrun config")
    view = next((view for view in views if view.name == name), None)
    if view is None:
        raise UsageError(
            Text("config.unknown", "unknown setting {name:quote}", name=name),
            hint=suggestion(name, [view.name for view in views])
            or Text("config.list", "list settings: ascendrun config"),
        )
    print("" if view.value is None else sanitise_line(view.value))


HEAD = Text("prune.head", "(head node)")


@cli_command("prune")
@click.option("--older", type=DURATIONS, help="Age limit instead of the settings.")
@click.option("--keep", multiple=True, metavar="JOB", help="Keep the logs of this job; may be repeated.")
@click.option("--engine", metavar="NAME", help="Remove what jobs have left in this engine, and nothing else.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@output_option
def prune_command(
    ctx: CliContext, older: float | None, keep: tuple[str, ...], engine: str | None, dry_run: bool, output: str | None
) -> int:
    """Remove logs of ended jobs from the head node and the nodes, and directories that nothing
    has used: staged ones, and texts encoded by the bundled programs.

    The controller does the same once a day, on nodes that are connected. Limits: settings `keep_jobs_days`,
    `keep_jobs_gib`, `keep_node_days`, `keep_node_gib` (`ascendrun config`). Live jobs, checkpoints and files that
    ranks wrote to their working directory stay. Exit code 6: some nodes are unreachable.

    Examples:
    ascendrun prune --dry-run                # what would go, by the settings keep_…
    ascendrun prune --older 7d --keep qwen32b-lora
    ascendrun prune --engine cloud           # pods that no job uses, those of other heads if they have ended
    """
    if engine is not None:
        check_alone("--engine", {"--older": older is not None, "--keep": bool(keep)})
    found = (
        ctx.cluster.jobs.prune(older_s=older, keep=keep, dry_run=dry_run)
        if engine is None
        else ctx.cluster.jobs.prune_engine(engine, dry_run=dry_run)
    )
    replies = ctx.gather(
        found, lambda found: Text("prune.progress", "{count:plural host hosts} replied", count=len(found))
    )
    columns = [
        Column("HOST", lambda reply: str(HEAD) if reply.host is None else reply.host),
        Column("JOBS", lambda reply: str(len(reply.jobs))),
        Column("DIRECTORIES", lambda reply: str(len(reply.trees))),
        Column("SIZE", lambda reply: describe_memory(_size(reply))),
        Column("ERROR", lambda reply: str(reply.refused.message if reply.refused else "")),
    ]
    print_rows(replies, columns, output, name="hosts", kind=PruneReply)
    if output in PEOPLE:
        total = sum(map(_size, replies))
        ctx.echo(
            Text("prune.would-free", "{size:bytes} would be freed", size=total)
            if dry_run
            else Text("prune.freed", "{size:bytes} freed", size=total)
        )
    return 6 if any(reply.refused for reply in replies) else 0


def _size(reply: PruneReply) -> int:
    return sum(one.size_bytes for one in (*reply.jobs, *reply.trees))


@cli_command("rm")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--force", is_flag=True, help="Also remove outputs that were not fetched, and jobs of unreachable hosts.")
@output_option
def rm_command(ctx: CliContext, jobs: tuple[str, ...], force: bool, output: str | None) -> int:
    """Remove ended jobs: their logs, events and outputs on the head node, their directories on the nodes.

    A pipeline is removed with all its stages. Live jobs are refused, and jobs whose declared outputs were not fetched.
    Files in directories that a job names itself (`checkpoint.dir`, absolute paths) stay. Exit code 6: a host is
    unreachable; the job stays in the list, so that the command can be repeated. 7: refused.

    Examples:
    ascendrun rm j-0001 j-0002
    ascendrun rm j-0003 --force         # its outputs were not fetched, or a host is gone
    """
    code = 0
    replies: list[PruneReply] = []
    for ref in jobs_of(ctx, jobs):
        name = ctx.cluster.jobs.detail(ref).job.id
        freed, failed = 0, False
        for reply in ctx.cluster.jobs.remove(ref, force=force):
            replies.append(reply)
            freed += _size(reply)
            if reply.refused is not None:
                failed = failed or not force
                host = HEAD if reply.host is None else reply.host
                ctx.error(
                    Text("rm.failed", "{job}: {host}: {why}", job=name, host=host, why=reply.refused.message),
                    reply.refused.hint,
                )
        if failed:
            code = 6
        else:
            ctx.say("rm.done", "{job} removed, {size:bytes} freed", job=ref, size=freed)
    print_for_programs(replies, output, name="hosts", kind=PruneReply)
    return code


@cli_command("notify")
@click.option(
    "--test", "test", metavar="[NAME]", is_flag=False, flag_value="", help="Send a test to one target, or to all."
)
@output_option
def notify_command(ctx: CliContext, test: str | None, output: str | None) -> int:
    """Show the targets of notifications, or send a test. The settings file has them: notify, hook, deadman.

    Examples:
    ascendrun notify                          # targets and the result of their last notification
    ascendrun notify --test                   # send a test to every target and show the response
    ascendrun notify --test team-feishu
    """
    from ascendrun.cluster import NoticeTargetView

    if test is not None:
        return _test(ctx, test, output)
    views = ctx.cluster.notification_targets()
    columns = [
        Column("NAME", lambda view: view.name),
        Column("TYPE", lambda view: view.type),
        Column("TARGET", lambda view: view.where),
        Column("EVENTS", lambda view: ",".join(view.events)),
        Column("JOBS", lambda view: ",".join(view.jobs)),
        Column("WAITING", lambda view: str(view.waiting)),
        Column("LAST", lambda view: describe_time(view.last_at_s)),
        Column("RESULT", lambda view: str(view.problem or view.last_state or "-")),
        Column("RESPONSE", lambda view: view.last_reply or "-", is_wide=True),
        Column("FROM", lambda view: view.origin, is_wide=True),
    ]
    print_rows(views, columns, output, name="targets", kind=NoticeTargetView)
    if not views and output in PEOPLE:
        ctx.say("notify.none", "no notification targets are configured")
        ctx.hint(Text("notify.configure", "add notify, hook or deadman to the settings file, see docs/notices.md"))
    return 0


def _test(ctx: CliContext, name: str, output: str | None) -> int:
    """Return 0 when every target accepted the notification, 6 when some did not."""
    from ascendrun.cluster import NoticeTestResult

    results = ctx.cluster.test_notifications(name or None)
    columns = [
        Column("NAME", lambda result: result.name),
        Column("TYPE", lambda result: result.type),
        Column("RESULT", lambda result: result.outcome),
        Column("RESPONSE", lambda result: result.reply or "-"),
    ]
    print_rows(results, columns, output, name="results", kind=NoticeTestResult)
    return 0 if all(result.outcome == "delivered" for result in results) else 6
