"""The words of `top` in English and Chinese; what is data (host names, job ids, health words) stays as it is."""

from __future__ import annotations

from collections.abc import Mapping

COLUMNS: Mapping[str, tuple[str, str]] = {
    "host": ("HOST", "主机"),
    "device": ("DEV", "卡号"),
    "chip": ("CHIP", "型号"),
    "util": ("UTIL", "利用率"),
    "mem": ("MEM GiB", "显存GiB"),
    "power": ("POWER", "功耗"),
    "temp": ("TEMP", "温度"),
    "freq": ("MHz", "频率MHz"),
    "health": ("HEALTH", "健康"),
    "link": ("LINK", "链路"),
    "job": ("JOB", "作业"),
    "name": ("NAME", "名称"),
    "rank": ("RANK", "RANK"),
    "cpu": ("CPU", "CPU"),
    "rss": ("RSS", "内存"),
    "step": ("STEP", "步数"),
    "loss": ("LOSS", "LOSS"),
    "tokens": ("TOK/S", "TOK/S"),
    "mfu": ("MFU", "MFU"),
    "step_s": ("S/STEP", "秒/步"),
    "others": ("OTHERS", "比其他"),
    "traffic": ("TX/RX MB/s", "发/收MB/s"),
    "pid": ("PID", "PID"),
    "age": ("AGE", "多久前"),
    "note": ("NOTE", "备注"),
    "state": ("STATE", "状态"),
    "nodes": ("NODES", "节点"),
    "ranks": ("RANKS", "RANK数"),
    "utils": ("UTIL OF EACH", "各卡利用率"),
    "hottest": ("TEMP", "最高温"),
    "slowest": ("SLOWEST", "最慢"),
}

WORDS: Mapping[str, tuple[str, str]] = {
    "hosts": ("{n} hosts", "{n} 台主机"),
    "host1": ("1 host", "1 台主机"),
    "no-figures-of": ("{n} without figures", "{n} 台无数据"),
    "devices": ("{n} devices: {busy} busy, {idle} idle", "{n} 张卡:{busy} 忙,{idle} 闲"),
    "bad": ("{n} not well", "{n} 异常"),
    "unknown": ("health of {n} not known", "{n} 健康未知"),
    "shown": ("{n} of {all} rows", "{all} 行中的 {n} 行"),
    "idle": ("idle", "空闲"),
    "link-up": ("up", "通"),
    "link-down": ("DOWN", "断"),
    "problem-foreign": ("foreign {pids}", "外来进程 {pids}"),
    "problem-slow": ("slow", "偏慢"),
    "problem-silent": ("host silent", "主机失联"),
    "problem-stale": ("{age} old", "{age}前"),
    "sign-frequency": ("low frequency", "降频"),
    "sign-temperature": ("hot", "过热"),
    "sign-link": ("link", "链路"),
    "sign-data": ("waits for data", "等数据"),
    "sign-cpu": ("cpu", "CPU"),
    "why-unreachable": ("cannot be reached at present", "目前无法连接"),
    "why-no-answer": ("gave no answer", "没有应答"),
    "why-starting": ("the job is not running there yet", "作业尚未在此运行"),
    "why-no-samples": ("nothing was measured yet", "尚无测量数据"),
    "why-not-asked": ("no job, and not asked (name it, or give --hostfile)", "没有作业,未询问(请指名或给 --hostfile)"),
    "without": ("without figures:", "无数据:"),
    "nothing": ("nothing to show: no live job, no samples, no hosts named", "无可显示:没有作业、采样或指定的主机"),
    "rank": ("rank {n}", "rank {n}"),
    "no-tui": ("plain view; more with keys: pip install 'ascendrun[tui]'. ^C ends",
               "简易视图;交互界面请安装:pip install 'ascendrun[tui]'。^C 退出"),
    "more-rows": ("… {n} more rows (narrow with --job, HOSTS, --bad, or enlarge the terminal)",
                  "… 还有 {n} 行(可用 --job、HOSTS、--bad 缩小范围,或放大终端)"),
    "failed": ("could not look: {why}", "无法读取:{why}"),
}

KEYS: Mapping[str, tuple[str, str]] = {
    "quit": ("Quit", "退出"),
    "help": ("Help", "帮助"),
    "filter": ("Filter", "过滤"),
    "sort": ("Sort", "排序"),
    "reverse": ("Reverse", "倒序"),
    "detail": ("Detail", "详情"),
    "logs": ("Logs", "日志"),
    "events": ("Events", "事件"),
    "all": ("Mine/all", "本作业/全部"),
    "bad": ("Unhealthy", "仅异常"),
    "hosts": ("By host", "按主机"),
    "back": ("Back", "返回"),
    "command": ("Command", "命令"),
    "pause": ("Pause", "暂停"),
}


def word(lang: str, key: str, **values: object) -> str:
    return WORDS[key][lang == "zh"].format(**values)


def title(lang: str, column: str) -> str:
    return COLUMNS[column][lang == "zh"]


def key_word(lang: str, key: str) -> str:
    return KEYS[key][lang == "zh"]
