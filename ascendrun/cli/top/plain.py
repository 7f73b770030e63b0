"""`top` without textual: the plain print, drawn anew in place until ^C."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING

from ascendrun.cli.output import cut
from ascendrun.cli.top.order import Order, arrange
from ascendrun.cli.top.words import word

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.health.top.rows import Choice
    from ascendrun.insight import TopSource

HOME_AND_CLEAR = "\x1b[H\x1b[J"
ALTERNATE, BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run_plain(ctx: CliContext, source: TopSource, choice: Choice, order: Order, *, lang: str, every_s: float) -> int:
    from ascendrun.cli.top.text import top_lines

    color = ctx.has_color(sys.stdout)
    pause = threading.Event()
    sys.stdout.write(ALTERNATE)
    try:
        while True:
            view = arrange(source.look(now_s=time.time()), choice, order)
            width, height = shutil.get_terminal_size()
            room = max(1, height - 8 - len(view.jobs) - min(4, sum(1 for host in view.hosts if host.why)))
            lines = top_lines(view, lang=lang, width=width, color=color, most_rows=room, by_host=order.by_host)[
                : height - 2
            ]
            lines.append(cut(word(lang, "no-tui"), width))
            sys.stdout.write(HOME_AND_CLEAR + "\r\n".join(lines))
            sys.stdout.flush()
            pause.wait(every_s)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(BACK)
        sys.stdout.flush()
