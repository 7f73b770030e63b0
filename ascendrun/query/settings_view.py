"""Settings for display: of a notification target only its host."""

from __future__ import annotations

from dataclasses import dataclass

from ascendrun.core.settings import NOTICE_BLOCKS, SETTINGS, Settings
from ascendrun.text import Text


@dataclass(frozen=True)
class SettingView:
    """One setting as `config` shows it. `value` None: not set."""

    name: str
    value: str | None
    origin: str
    meaning: Text


def view_settings(settings: Settings) -> tuple[SettingView, ...]:
    """Return every setting with value and origin. Raises InvalidInputError: a block of notifications is invalid."""
    views = []
    for setting in SETTINGS:
        value = setting.value(settings)
        text = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        views.append(SettingView(setting.name, text, settings.origins[setting.name], setting.meaning))
    shown: dict[str, list[str]] = {block: [] for block in NOTICE_BLOCKS}
    origins: dict[str, str] = {}
    if settings.notice_blocks:
        from ascendrun.core.notice_settings import read_notices
        from ascendrun.head.notify.delivery import where_of

        notices = read_notices(settings)
        origins.update(notices.origins)
        for target in notices.targets:
            name = f"{target.name} ({target.type})" if target.name != target.type else target.name
            shown[target.block].append(f"{name} {where_of(target)}")
    for block, meaning in NOTICE_BLOCKS.items():
        views.append(SettingView(block, ", ".join(shown[block]) or None, origins.get(block, "default"), meaning))
    return tuple(views)
