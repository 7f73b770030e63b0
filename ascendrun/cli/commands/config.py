"""config: the settings and their origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import cli_command, output_option
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext

DEFAULT = Text("config.default", "default")


@cli_command(
    "config",
    examples="""
    ascendrun config                         # every setting and where it comes from
    ascendrun config get state_dir
    ASCENDRUN_COLOR=never ascendrun config list -o json
""",
)
@click.argument("action", type=click.Choice(["list", "get"]), default="list")
@click.argument("name", required=False)
@output_option
@click.pass_obj
def command(ctx: CliContext, action: str, name: str | None, output: str | None) -> int:
    """Show settings: flag > $ASCENDRUN_… > ~/.config/ascendrun/config.yaml > /etc/ascendrun/config.yaml > default."""
    from ascendrun.cli.output import Column, print_rows
    from ascendrun.cli.sanitise import sanitise_line
    from ascendrun.core.settings import SettingView
    from ascendrun.text import suggestion

    views = ctx.cluster.config()
    if action == "list":
        if name is not None:
            raise UsageError(
                Text("config.extra-name", "`config list` cannot be combined with a name"),
                hint=f"ascendrun config get {name}",
            )
        print_rows(
            views,
            [
                Column("NAME", lambda view: view.name),
                Column("VALUE", lambda view: "-" if view.value is None else view.value),
                Column("ORIGIN", lambda view: str(DEFAULT) if view.origin == "default" else view.origin),
                Column("MEANING", lambda view: str(view.meaning)),
            ],
            output,
            name="settings",
            kind=SettingView,
        )
        return 0
    if name is None:
        raise UsageError(
            Text("config.no-name", "`config get` requires a name"),
            hint=Text("config.list", "list settings: ascendrun config"),
        )
    view = next((view for view in views if view.name == name), None)
    if view is None:
        raise UsageError(
            Text("config.unknown", "unknown setting {name:quote}", name=name),
            hint=suggestion(name, [view.name for view in views])
            or Text("config.list", "list settings: ascendrun config"),
        )
    print("" if view.value is None else sanitise_line(view.value))
    return 0
