"""Table widget: draws only visible rows; the cursor stays with its row when rows move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ascendrun.cli.output import cut
from ascendrun.cli.top.columns import TableLayout
from ascendrun.health.top.rows import HostLine, IdleHosts

STYLES = {"red": Style(color="red", bold=True), "yellow": Style(color="yellow"), "dim": Style(dim=True), None: Style()}
CURSOR = Style(reverse=True)


def plain(text: str) -> Text:
    """Return text without markup and links."""
    return Text(text, no_wrap=True)


def hidden_keys(actions: Mapping[str, str]) -> list[BindingType]:
    """Return bindings that the footer does not show, by key."""
    return [Binding(key, action, show=False) for key, action in actions.items()]


def key_of(line: Any) -> tuple[object, ...]:
    if isinstance(line, IdleHosts):
        return ("idle", line.samples[0].name, line.devices)
    if isinstance(line, HostLine):
        return ("host", line.host)
    return (line.host, line.device, line.job, line.rank)


class RowsTable(ScrollView, can_focus=True):
    BINDINGS = hidden_keys(
        {
            "j,down": "move(1)",
            "k,up": "move(-1)",
            "g,home": "move(-1000000)",
            "G,end": "move(1000000)",
            "pagedown,ctrl+d,space": "page(1)",
            "pageup,ctrl+u": "page(-1)",
        }
    )

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Any] = ()
        self.cursor = 0
        self._laid: TableLayout | None = None
        self._row_styles: Sequence[str | None] = ()
        self._empty = ""

    @property
    def selected(self) -> Any:
        """The line under the cursor; None: the table is empty."""
        return self.lines[self.cursor] if self.cursor < len(self.lines) else None

    def show(self, laid: TableLayout, lines: Sequence[Any], styles: Sequence[str | None], *, empty: str) -> None:
        before = self.selected
        keys = [key_of(line) for line in lines]
        self.lines, self._laid, self._row_styles, self._empty = lines, laid, styles, empty
        if before is not None and key_of(before) in keys:
            self.cursor = keys.index(key_of(before))
        self.cursor = max(0, min(self.cursor, len(lines) - 1))
        self.virtual_size = Size(1, len(lines))
        self._scroll_to_cursor()
        self.refresh()

    def reset(self) -> None:
        """Move the cursor to the first row."""
        self.lines, self.cursor = (), 0

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        index = y + self.scroll_offset.y
        if self._laid is None or index >= len(self.lines):
            text = self._empty if self._laid is not None and index == 0 else ""
            return self._strip(text, Style(dim=True), width)
        style = STYLES[self._row_styles[index]]
        return self._strip(self._laid.text(index), style + CURSOR if index == self.cursor else style, width)

    def _strip(self, text: str, style: Style, width: int) -> Strip:
        return Strip([Segment(cut(text, width), self.rich_style + style)]).adjust_cell_length(
            width, self.rich_style + style
        )

    def action_move(self, by: int) -> None:
        self.cursor = max(0, min(self.cursor + by, len(self.lines) - 1))
        self._scroll_to_cursor()
        self.refresh()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def on_click(self, event: Any) -> None:
        index = event.y + self.scroll_offset.y
        if index < len(self.lines):
            self.cursor = index
            self.refresh()

    def _scroll_to_cursor(self) -> None:
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)
