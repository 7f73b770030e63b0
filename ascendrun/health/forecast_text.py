"""The forecast in words: one line, and what it rests on."""

from __future__ import annotations

from ascendrun.health.forecast import Forecast
from ascendrun.health.texts import Words, fill, texts

_UNITS = {
    "en": (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)),
    "zh": (("天", 86400.0), ("小时", 3600.0), ("分钟", 60.0), ("秒", 1.0)),
}


def tell_forecast(forecast: Forecast, lang: str = "en") -> Words:
    """`says`: the line; `advice`: the assumptions and their source."""
    row = texts(lang)["forecast-own" if forecast.has_own_history else "forecast"]
    plural = "s" if forecast.nodes != 1 else ""
    values = {
        "nodes": f"{forecast.nodes} 个节点" if lang == "zh" else f"{forecast.nodes} node{plural}",
        "between": told_duration(forecast.between_failures_s, lang),
        "every": told_duration(forecast.save_every_s, lang),
        "share": _told_share(forecast.effective_share),
        "hourly": _told_share(forecast.hourly_share),
        "rate": f"{forecast.rate_per_node_day:.2g}",
        "source": forecast.rate_source,
        "restart": told_duration(forecast.restart_s, lang),
        "save": told_duration(forecast.save_s, lang),
        "failures": str(forecast.own_failures),
        "days": _told_days(forecast.own_node_days),
    }
    return Words(fill(row["says"], values), fill(row["advice"], values))


def told_duration(seconds: float, lang: str = "en") -> str:
    """Two digits and the largest unit of which there are at least two."""
    for unit, size in _UNITS[lang]:
        if seconds >= 2 * size or size == 1.0:
            count = seconds / size
            return f"{count:.0f} {unit}" if count >= 10 else f"{count:.1f} {unit}"
    raise AssertionError("the last unit always fits")


def _told_share(share: float) -> str:
    """Never rounded up to a 100 % that nobody reaches."""
    return f"{int(share * 1000) / 10:.1f} %"


def _told_days(days: float) -> str:
    return f"{days:.0f}" if days >= 10 else f"{days:.1f}"
