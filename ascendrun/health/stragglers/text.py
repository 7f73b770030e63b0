"""A straggler in words, English and Chinese: who, by how much, what it costs, and the likeliest sign."""

from __future__ import annotations

from collections.abc import Mapping

from ascendrun.core.logs.log_lines import fold_ranks
from ascendrun.health.stragglers.causes import Mark, Sign
from ascendrun.health.stragglers.detect import Straggler

_WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "rank": "rank {rank} on {host}",
        "node": "{host} (ranks {ranks})",
        "slow": "{who} is slow: {percent} % more time than the others",
        "costs": ", {costs} % of every step",
        "suspect": "{who} stands out",
        "sign": "; likeliest sign: {sign}",
        "no-sign": "; nothing that is measured tells why",
    },
    "zh": {
        "rank": "{host} 上的 rank {rank}",
        "node": "{host}(rank {ranks})",
        "slow": "{who} 偏慢：比其他 rank 多用 {percent} % 的时间",
        "costs": "，每一步因此损失 {costs} %",
        "suspect": "{who} 的指标异常",
        "sign": "；最可能的原因：{sign}",
        "no-sign": "；已有的测量看不出原因",
    },
}
_SIGNS: Mapping[str, Mapping[Sign, str]] = {
    "en": {
        Sign.FREQUENCY: "its device's clock is low",
        Sign.TEMPERATURE: "its device is hot",
        Sign.LINK: "its network link",
        Sign.DATA: "it waits for data",
        Sign.CPU: "it gets too little of the host",
        Sign.SHARED: "another process uses its device",
        Sign.HEALTH: "its device complains",
    },
    "zh": {
        Sign.FREQUENCY: "设备主频偏低",
        Sign.TEMPERATURE: "设备温度过高",
        Sign.LINK: "网络链路",
        Sign.DATA: "在等待数据",
        Sign.CPU: "主机资源不足",
        Sign.SHARED: "有其他进程占用该设备",
        Sign.HEALTH: "设备自报异常",
    },
}
_FIGURES: Mapping[str, tuple[str, str, str]] = {
    "frequency_mhz": ("{here:.0f} MHz, others {others:.0f}", "{here:.0f} MHz，其他为 {others:.0f}", ""),
    "frequency_drop": ("fell from {others:.0f} to {here:.0f} MHz", "由 {others:.0f} 降至 {here:.0f} MHz", ""),
    "temperature_c": ("{here:.0f} °C, others {others:.0f}", "{here:.0f} °C，其他为 {others:.0f}", "{here:.0f} °C"),
    "link_up": ("down, the others are up", "已断开，其他均正常", ""),
    "link_downs": ("went down {more:.0f} times meanwhile", "期间断开 {more:.0f} 次", ""),
    "link_tx_bytes_s": ("{here_mb:.0f} MB/s, others {others_mb:.0f}", "{here_mb:.0f} MB/s，其他为 {others_mb:.0f}", ""),
    "data_s": ("{here:.3g} s a step, others {others:.3g}", "每步 {here:.3g} 秒，其他为 {others:.3g}", ""),
    "cpu": (
        "CPU {here:.0f} %, other hosts {others:.0f}",
        "CPU {here:.0f} %，其他主机为 {others:.0f}",
        "CPU {here:.0f} %",
    ),
    "memory": ("memory {here_percent:.0f} % full", "内存已用 {here_percent:.0f} %", "{here_percent:.0f} %"),
    "stopped": ("the process is stopped (state T)", "进程处于停止状态（T）", ""),
    "rank_cpu": ("{here:.0f} % of a core, others {others:.0f}", "占单核 {here:.0f} %，其他为 {others:.0f}", ""),
    "pids": ("{here:.0f} processes, others {others:.0f}", "{here:.0f} 个进程，其他为 {others:.0f}", "{here:.0f}"),
    "health": ("{here:.0f} of its devices not OK", "{here:.0f} 个设备状态异常", "{here:.0f}"),
}


def name_straggler(straggler: Straggler, lang: str = "en") -> str:
    """rank 5 on npu03; npu03 (ranks 16-23)."""
    words = _WORDS[lang]
    if straggler.rank is not None:
        return words["rank"].format(rank=straggler.rank, host=straggler.host)
    return words["node"].format(host=straggler.host, ranks=fold_ranks(straggler.ranks))


def tell_straggler(straggler: Straggler, lang: str = "en") -> str:
    """One sentence with everything that is known of it."""
    words, who = _WORDS[lang], name_straggler(straggler, lang)
    if straggler.slower_by is None:
        told = words["suspect"].format(who=who)
    else:
        told = words["slow"].format(who=who, percent=f"{100 * (straggler.slower_by - 1):.0f}")
        if straggler.costs is not None:
            told += words["costs"].format(costs=f"{100 * straggler.costs:.0f}")
    if straggler.sign is None:
        return told + words["no-sign"]
    marks = [tell_mark(mark, lang) for mark in straggler.evidence if mark.sign is straggler.sign]
    return told + words["sign"].format(sign=" · ".join([_SIGNS[lang][straggler.sign], *marks]))


def tell_mark(mark: Mark, lang: str = "en") -> str:
    """The figure and what it is elsewhere: 900 MHz, others 1800."""
    row = _FIGURES.get(mark.figure)
    if row is None:
        return f"{mark.figure} {mark.here:g}"
    others = mark.others or 0.0
    values: dict[str, float] = {
        "here": mark.here,
        "others": others,
        "more": mark.here - others,
        "here_mb": mark.here / 1e6,
        "others_mb": others / 1e6,
        "here_percent": 100 * mark.here,
    }
    alone = row[2] if mark.others is None and row[2] else None
    return (alone or row[lang == "zh"]).format(**values)
