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
    "others": ("VS", "快慢"),
    "traffic": ("TX/RX MB/s", "发/收MB/s"),
    "pid": ("PID", "PID"),
    "age": ("AGE", "多久前"),
    "note": ("NOTE", "备注"),
    "state": ("STATE", "状态"),
    "nodes": ("NODES", "节点"),
    "ranks": ("RANKS", "RANK数"),
    "load": ("LOAD", "负载"),
    "disk": ("DISK", "剩余磁盘"),
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
    "sign-frequency": ("low clock", "降频"),
    "sign-temperature": ("hot", "过热"),
    "sign-link": ("link", "链路"),
    "sign-data": ("waits for data", "等数据"),
    "sign-cpu": ("cpu short", "CPU 不足"),
    "sign-shared": ("shared", "被共用"),
    "sign-health": ("device ill", "设备异常"),
    "why-unreachable": ("cannot be reached at present", "目前无法连接"),
    "why-no-answer": ("gave no answer", "没有应答"),
    "why-starting": ("the job is not running there yet", "作业尚未在此运行"),
    "why-no-samples": ("nothing was measured yet", "尚无测量数据"),
    "why-not-asked": ("no job, and not asked (name it, or give --hostfile)", "没有作业,未询问(请指名或给 --hostfile)"),
    "without": ("without figures:", "无数据:"),
    "nothing": ("nothing to show: no live job, no samples, no hosts named", "无可显示:没有作业、采样或指定的主机"),
    "rank": ("rank {n}", "rank {n}"),
    "no-tui": (
        "plain view; more with keys: pip install 'ascendrun[tui]'. ^C ends",
        "简易视图;交互界面请安装:pip install 'ascendrun[tui]'。^C 退出",
    ),
    "more-rows": (
        "… {n} more rows (narrow with --job, HOSTS, --bad, or enlarge the terminal)",
        "… 还有 {n} 行(可用 --job、HOSTS、--bad 缩小范围,或放大终端)",
    ),
    "late": ("looking for {n} s", "正在读取,已 {n} 秒"),
    "reading": ("reading …", "读取中…"),
    "no-lines": ("no output yet", "尚无输出"),
    "no-rank-here": ("no rank on this row", "该行没有 rank"),
    "ask-filter": ("host, job, chip, health … or a glob", "主机、作业、型号、健康…或通配符"),
    "ask-command": ("sort NAME · job JOB · host GLOB · all · q", "sort 名称 · job 作业 · host 通配符 · all · q"),
    "bad-command": ("no such command: {text}", "没有这个命令:{text}"),
    "shorter": ("Shorter", "缩短"),
    "longer": ("Longer", "延长"),
    "device": ("device", "卡"),
    "of-rank": ("rank", "rank"),
    "of-host": ("host", "主机"),
    "last": ("last {span}", "最近 {span}"),
    "age": ("measured {age} ago", "{age}前测量"),
    "port": ("port", "端口"),
    "downs": (" (down {n} times)", "(断过 {n} 次)"),
    "of-util": ("utilisation", "利用率"),
    "of-mem": ("memory GiB", "显存 GiB"),
    "of-power": ("power", "功耗"),
    "of-temp": ("temperature", "温度"),
    "of-freq": ("clock MHz", "频率 MHz"),
    "of-traffic": ("tx/rx MB/s", "发/收 MB/s"),
    "of-cpu": ("cpu", "CPU"),
    "of-rss": ("memory", "内存"),
    "of-step": ("step", "步数"),
    "of-loss": ("loss", "loss"),
    "of-tokens": ("tokens/s", "tokens/s"),
    "of-step_s": ("s/step", "秒/步"),
    "of-load": ("load", "负载"),
    "of-memory": ("memory GiB", "内存 GiB"),
    "of-disk": ("disk free", "磁盘剩余"),
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
    "all": ("Busy", "有作业"),
    "bad": ("Bad", "异常"),
    "hosts": ("Hosts", "主机"),
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


HELP = (
    """\
q              quit                       ?        this page
up down j k    row                        g G      first and last row
PgUp PgDn      page                       enter    figures of the row and how they went
/              filter: host, job, chip, health, problem, rank3, or a glob; escape clears
s              next order: host, util, mem, power, temp, step, job, age
r              the other way round        p        pause
a              only what a job is on      u        only what is not well
h              a line a host              l        last lines of the rank
e              story of the job           :        a command

:sort NAME     that order                 :job JOB   only that job
:host GLOB     only these hosts           :all       everything again

"-"            not known, never 0
VS             the rank's own time a step beside the median of the job's other ranks
MEM GiB        used / total of the device
AGE            how old the row's figures are
red            health, network port, silent host
yellow         slow rank, foreign process
dim            no job, or old figures
""",
    """\
q              退出                       ?        本页
上 下 j k      移动一行                   g G      第一行和最后一行
PgUp PgDn      翻页                       enter    该行的全部数据及其变化
/              过滤:主机、作业、型号、健康、问题、rank3 或通配符;Esc 清除
s              换排序:host, util, mem, power, temp, step, job, age
r              倒序                       p        暂停
a              仅有作业的                 u        仅异常的
h              每台主机一行               l        该 rank 的最后输出
e              作业的经过                 :        命令

:sort 名称     按该项排序                 :job 作业  仅该作业
:host 通配符   仅这些主机                 :all       恢复全部

"-"            未知,绝不表示 0
快慢           该 rank 自身的每步时间与同作业其他 rank 的中位数之比
显存GiB        已用 / 总量
多久前         数据有多旧
红色           健康、网口、主机失联
黄色           偏慢的 rank、外来进程
暗色           没有作业,或数据过旧
""",
)
