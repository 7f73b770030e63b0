"""On which machine the commands of this one run. Every command imports this: it imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendrun.core.settings import STANDBY_BLOCK

if TYPE_CHECKING:
    from ascendrun.core.settings import Settings


def other_head(settings: Settings, *, is_of_machine: bool) -> str | None:
    """Return the other machine on which the commands of this one run; None: they run here. `is_of_machine`: a command
    about this machine, which only the setting `head` sends elsewhere. Raises UnreachableError."""
    heads = [head.strip() for head in (settings.head or "").split(",") if head.strip()]
    has_standby = any(STANDBY_BLOCK in blocks.root.entries for blocks in settings.blocks)
    if not heads and (not has_standby or is_of_machine):
        return None
    from ascendrun.head.state.store_place import is_this_machine, may_be_head

    if heads and not any(map(is_this_machine, heads)):
        if len(heads) == 1:
            return heads[0]
        from ascendrun.cluster.standby import find_head

        return find_head(heads)
    if not has_standby or is_of_machine:
        return None
    from ascendrun.head.loop.daemon import is_running

    if may_be_head(settings.state_dir) and is_running(settings.state_dir):  # else the other one may have taken over
        return None
    from ascendrun.cluster.standby import find_other_head

    return find_other_head(settings)
