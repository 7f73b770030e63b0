"""config: the settings and their origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from ascendrun.cli.command import UsageError
from ascendrun.cli.options import cli_command, output_option
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext


@dataclass(frozen=True)
class SettingView:
    """One setting as `config` shows it. `value` None: not set."""

    name: str
    value: str | None
    origin: str
    meaning: str


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
    from ascendrun.text import suggestion

    views = _views(ctx)
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
                Column("MEANING", lambda view: view.meaning),
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


def _views(ctx: CliContext) -> list[SettingView]:
    from ascendrun.core.settings import SETTINGS

    settings = ctx.settings
    views = []
    for one in SETTINGS:
        value = getattr(settings, one.name)
        text = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        views.append(SettingView(one.name, text, settings.origins[one.name], str(one.meaning)))
    return views + _notice_views(ctx)


def _notice_views(ctx: CliContext) -> list[SettingView]:
    """Return the targets of notifications; of URLs the host only, since the rest is a credential."""
    from ascendrun.core.settings import NOTICE_BLOCKS

    notices = ctx.settings.notices
    meanings = {
        "notify": str(Text("config.meaning.notify", "services that receive notifications")),
        "hook": str(Text("config.meaning.hook", "command that receives notifications")),
        "deadman": str(Text("config.meaning.deadman", "URL requested at intervals while jobs run")),
    }
    texts: dict[str, list[str]] = {block: [] for block in NOTICE_BLOCKS}
    if notices is not None:
        from ascendrun.query.notice_view import where_of

        for target in notices.everyone:
            block = target.kind if target.kind in texts else "notify"
            shown = f"{target.name} ({target.kind})" if target.name != target.kind else target.name
            texts[block].append(f"{shown} {where_of(target)}")
    origins = notices.origins if notices is not None else {}
    return [
        SettingView(block, ", ".join(texts[block]) or None, origins.get(block, "default"), meanings[block])
        for block in NOTICE_BLOCKS
    ]
