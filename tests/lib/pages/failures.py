"""docs/failures.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ascendrun.ascend.signatures import Signature, signatures
from ascendrun.ascend.vocabularies import read_table, value_of
from ascendrun.text import LANGUAGES, translations

HEAD = """# Known failures · 已知故障

Look up a line of a log here: its meaning, usual cause and hint, in English and Chinese. This page is generated from
`ascendrun/ascend/signatures.toml` by `python -m tests.lib.pages`. `ascendrun explain
JOB` searches the logs of all ranks for these lines and ranks them; use this page when you have a line but no job.

Each entry has an example with synthetic values. `…` stands for a value that the line contains.

The role of a line: a **cause** is the cause itself; a **symptom** shows where the job failed, not why; a
**consequence** follows another failure; **teardown** belongs to a job that had already ended. The number after the
role (0 to 100) states how reliably the line identifies the cause.

每个条目对应某个程序在作业失败时输出的一行日志：含义、常见原因和处理建议，并附示例（数值为虚构）。
`ascendrun explain JOB` 会在所有 rank 的日志中查找并权衡这些行；没有作业、只有一行报错时，可直接在本页搜索。
角色：**原因**即根因；**现象**说明失败的位置而非原因；**后果**由其他故障引起；**收尾**是作业失败后的清理。
其后的数字（0 到 100）表示该行指明原因的可靠程度。

To add a row, edit `ascendrun/ascend/signatures.toml`: a pattern, an example and a line that must not match.
"""

FAMILIES: Mapping[str, str] = {
    "hccl": "HCCL: collectives between NPUs · HCCL 集合通信",
    "acl": "ACL: return codes of the runtime · ACL 返回码",
    "cann": "CANN: runtime, compiler, operators · CANN 运行时、编译器、算子",
    "torch_npu": "torch_npu",
    "driver": "Driver and devices · 驱动与设备",
    "memory": "Memory: device and host · 内存：设备与主机",
    "numeric": "Numbers: NaN, overflow · 数值：NaN、溢出",
    "data": "Data loading · 数据加载",
    "storage": "Files and disks · 文件与磁盘",
    "limits": "Limits of the system · 系统限额",
    "network": "Network and rendezvous · 网络与会合",
    "gloo": "gloo and process groups · gloo 与进程组",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "python": "Python and its packages · Python 与软件包",
    "ssh": "SSH",
    "launcher": "Launchers: torchrun, DeepSpeed, Slurm · 启动器",
    "model": "Models and checkpoints · 模型与检查点",
    "host": "The node itself · 节点本身",
    "signal": "Signals and crashes · 信号与崩溃",
}
ROLES_ZH: Mapping[str, str] = {"cause": "原因", "symptom": "现象", "consequence": "后果", "teardown": "收尾"}
RETRIES: Mapping[str, str] = {
    "same": "a retry may succeed",
    "exclude": "retry without this node",
    "never": "will fail again until this is fixed",
    "unknown": "outcome of a retry: unknown",
}
VOCABULARIES = ("acl", "cann", "errnos")
_CODE_SPAN = re.compile(r"(`[^`]*`)")


def render_page() -> str:
    by_family: dict[str, list[Signature]] = {}
    for row in signatures():
        by_family.setdefault(row.family, []).append(row)
    lines = [HEAD.rstrip(), "", "| | entries |", "|---|---|"]
    lines += [f"| [{FAMILIES[family]}](#{family}) | {len(rows)} |" for family, rows in by_family.items()]
    codes = sum(len(keys) for name in VOCABULARIES for keys in read_table(name)["fixes"].values())
    lines += [f"| [Return codes, error ids and errno · 返回码、错误 ID 与 errno](#codes) | {codes} |"]
    for family, rows in by_family.items():
        lines += ["", f'<a id="{family}"></a>', "", f"## {FAMILIES[family]}"]
        for row in rows:
            lines += _row(row)
    return "\n".join([*lines, *_codes()]) + "\n"


def _codes() -> Iterator[str]:
    """Yield what to do about the codes that need no row: their vocabulary has it."""
    yield from ("", '<a id="codes"></a>', "", "## Return codes, error ids and errno · 返回码、错误 ID 与 errno", "")
    yield from ("| | domain | |", "|---|---|---|")
    for name in VOCABULARIES:
        for fix, keys in read_table(name)["fixes"].items():
            domains = dict.fromkeys(value.domain for value in (value_of(name, key) for key in keys) if value)
            english, chinese = (translations(lang)[f"diagnosis.fix.{fix}"] for lang in LANGUAGES)
            shown = ", ".join(f"`{key}`" for key in keys)
            yield f"| {shown} | {', '.join(domains)} | {_sentence(english)}<br>{_plain(chinese)}。 |"


def _row(row: Signature) -> Sequence[str]:
    english, chinese = row.words("en"), row.words("zh")
    doubt = "" if row.is_verified else " Its text is unverified."
    role = f"{row.role} · {ROLES_ZH[row.role]} ({row.strength})"
    return [
        "",
        f"### `{row.code}`",
        "",
        f"{_sentence(english.message)} **Cause:** {_plain(english.cause)}. **Hint:** {_plain(english.hint)}.",
        "",
        f"{_plain(chinese.message)}。**原因**：{_plain(chinese.cause)}。**处理建议**：{_plain(chinese.hint)}。",
        "",
        f"{role}; domain {row.domain}; {RETRIES[row.retry]}.{doubt}",
        "",
        f"    {row.examples[0].strip()}",
    ]


def _sentence(text: str) -> str:
    plain = _plain(text)
    return f"{plain[0].upper()}{plain[1:]}."


def _plain(text: str) -> str:
    """Remove the characters that are Markdown markup, except in code spans."""
    parts = _CODE_SPAN.split(text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<~])", r"\\\1", part) for part in parts)
