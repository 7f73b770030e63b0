"""notify: the targets of notifications, their last results, and a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.options import cli_command, output_option
from ascendrun.cli.output import PEOPLE, Column, describe_time, print_rows
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@cli_command(
    "notify",
    examples="""
    ascendrun notify                          # targets and the result of their last notification
    ascendrun notify --test                   # send a test to every target and show the response
    ascendrun notify --test team-feishu
""",
)
@click.option(
    "--test", "test", metavar="[NAME]", is_flag=False, flag_value="", help="Send a test to one target, or to all."
)
@output_option
@click.pass_obj
def command(ctx: CliContext, test: str | None, output: str | None) -> int:
    """Show the targets of notifications, or send a test. The settings file has them: notify, hook, deadman."""
    from ascendrun.cluster import NoticeTargetView

    if test is not None:
        return _test(ctx, test, output)
    views = ctx.cluster.notification_targets()
    print_rows(
        views,
        [
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
        ],
        output,
        name="targets",
        kind=NoticeTargetView,
    )
    if not views and output in PEOPLE:
        ctx.echo(Text("notify.none", "no notification targets are configured"))
        ctx.hint(Text("notify.configure", "add notify, hook or deadman to the settings file, see docs/notices.md"))
    return 0


def _test(ctx: CliContext, name: str, output: str | None) -> int:
    """Return 0 when every target accepted the notification, 6 when some did not."""
    from ascendrun.cluster import NoticeTestResult

    results = ctx.cluster.test_notifications(name or None)
    print_rows(
        results,
        [
            Column("NAME", lambda result: result.name),
            Column("TYPE", lambda result: result.type),
            Column("RESULT", lambda result: result.outcome),
            Column("RESPONSE", lambda result: result.reply or "-"),
        ],
        output,
        name="results",
        kind=NoticeTestResult,
    )
    return 0 if all(result.outcome == "delivered" for result in results) else 6
