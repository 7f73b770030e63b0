"""help: print the help of a command, or a page of the documentation, which the package carries."""

from __future__ import annotations

import sys

import click

from ascendrun.carried import PAGES, read_pages, title_of
from ascendrun.cli.app import ALIASES, BY_NAME, cli
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import cli_command
from ascendrun.core.errors import NotFoundError
from ascendrun.text import Text, language, suggestion


@cli_command("help")
@click.argument("topic", required=False)
def command(ctx: CliContext, topic: str | None) -> None:
    """Print the help of a command, or a page of the documentation: TOPIC is a command, or a page as messages name it.

    Examples:
    ascendrun help submit
    ascendrun help docs                   # list the pages
    ascendrun help docs/recovery.md       # also: recovery
    """
    group = click.get_current_context().find_root()
    if topic is None:
        click.echo(group.get_help())
        return
    if topic in BY_NAME or topic in ALIASES:
        found = cli.get_command(group, topic)
        assert found is not None
        click.echo(found.get_help(click.Context(found, group, info_name=found.name)))
        return
    pages = read_pages(language())
    if topic.rstrip("/") == PAGES:
        width = max(map(len, pages))
        click.echo("\n".join(f"{name:<{width}}  {title_of(path)}" for name, path in pages.items()))
        return
    name = topic.removeprefix(f"{PAGES}/").removesuffix(".md")
    if name not in pages:
        names = [*BY_NAME, *pages]
        text = Text("pages.unknown", "no command and no page {topic:quote}", topic=topic)
        raise NotFoundError(
            text, hint=suggestion(name, names) or Text("pages.list", "ascendrun help docs lists the pages")
        )
    page = pages[name].read_text(encoding="utf-8")
    click.echo_via_pager(page) if sys.stdout.isatty() else click.echo(page, nl=False)
