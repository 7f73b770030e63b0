"""Failures of many ranks with mixed logs, from a seed: the input of benchmarks.verdicts.

Both checkouts of a comparison load this file, so it uses only what the evidence of both has.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from ascendrun.health.diagnosis import Evidence, FixedClock, HostEvidence, Line, RankEvidence

PER_HOST = 8
KINDS = 16
"""Ordinary output differs among so many ranks, and is repeated beyond, but for its identifiers."""
BEGAN_S, FAILED_S, STEP_S = 1_790_000_000.0, 4000.0, 1.2
SITE = "/opt/env/lib/python3.10/site-packages"


def evidence(shape: str, ranks: int, lines: int) -> Evidence:
    """Return a failure of one of SHAPES with this number of ranks and lines of each."""
    hosts = [f"npu{number + 1:03d}" for number in range(-(-ranks // PER_HOST))]
    failed_s = BEGAN_S + FAILED_S
    return Evidence(
        job="j-0007",
        name=shape,
        state="FAILED",
        cause="failure",
        device_type="npu",
        world_size=ranks,
        now_s=failed_s + 600,
        started_at_s=BEGAN_S,
        ended_at_s=failed_s + 60,
        ranks=tuple(_rank(shape, number, ranks, lines, hosts[number // PER_HOST]) for number in range(ranks)),
        hosts=tuple(
            HostEvidence(
                host=host,
                clock=FixedClock(0.0, 0.005),
                addresses=(f"10.0.{number // 250}.{number % 250 + 1}",),
                dmesg=(),
                stopped_at_s=failed_s + 30,
                stopped_by="failure",
                has_ended=True,
            )
            for number, host in enumerate(hosts)
        ),
    )


def _rank(shape: str, rank: int, ranks: int, count: int, host: str) -> RankEvidence:
    is_first = rank == ranks // 3
    end_s = BEGAN_S + FAILED_S + (0.0 if is_first else 5.0 + rank / ranks)
    texts = {"rank": str(rank), "pid": str(40000 + rank), "dev": str(rank % PER_HOST), "peer": str(ranks // 3)}
    texts["plog"] = time.strftime("%Y-%m-%d-%H:%M:%S.000.117", time.gmtime(end_s))
    ends = SHAPES[shape](is_first, texts)
    in_plog = count // 2 if shape == "plog" else 0
    plog = [*_plog(in_plog - len(ends.get("plog", ())), rank % KINDS), *ends.get("plog", ())]
    work = _work(count - in_plog - len(ends["err"]), rank % KINDS)
    streams: dict[str, list[Line]] = {"out": [], "err": []}
    offsets = {"out": 0, "err": 0}
    for number, (stream, text) in enumerate(work):
        if ID in text:
            text = text.replace(ID, f"{(rank * count + number) * 2654435761 & 0xFFFFFFFF:08x}")
        at_s = end_s - (count - number) * STEP_S / 2
        streams[stream].append(Line(text, f"{host}/rank-{rank}.{stream}.0", offsets[stream], at_s, stream))
        offsets[stream] += len(text) + 1
    for text in ends["err"]:
        streams["err"].append(Line(text, f"{host}/rank-{rank}.err.0", offsets["err"], end_s, "err"))
        offsets["err"] += len(text) + 1
    return RankEvidence(
        rank=rank,
        host=host,
        pid=int(texts["pid"]),
        device=rank % PER_HOST,
        code=1,
        exited_at_s=end_s + 0.3,
        lines=(*streams["out"], *streams["err"]),
        plog=tuple(
            Line(text, f"{host}/plog-{texts['pid']}.log", 200 * at, None, "plog") for at, text in enumerate(plog)
        ),
        last_output_s=end_s,
    )


# ---------------------------------------------------------------- ordinary output

ID = "{id}"
WARNINGS = (
    f"{SITE}/torch/utils/checkpoint.py:{{number}}: UserWarning: None of the inputs have requires_grad=True",
    "  warnings.warn(",
    "[rank{rank}]:[W1120 10:00:00.551 compiler_depend.ts:487] Warning: NPU warning, operator {number} falls back",
    "WARNING:datasets.builder:Found cached dataset shard {number}",
    "2026-11-20 10:00:00,551 - data - WARNING - sample {id} has 4097 tokens, truncated to 4096",
    "Loading checkpoint shards:  50%|█████     | {number}/9000 [01:10<01:42,  5.76it/s]",
    "retrying the download of shard {id}: Connection reset by peer",
)


@cache
def _work(count: int, rank: int) -> Sequence[tuple[str, str]]:
    """Return lines of a training with their streams: three of four are of its steps."""
    return list(_drawn_work(count, rank))


def _drawn_work(count: int, rank: int) -> Iterator[tuple[str, str]]:
    drawn = random.Random(rank)
    for number in range(count):
        kind = drawn.random()
        if kind < 0.5:
            yield "out", f"step {number} loss {3 - number / (count + 9):.4f} lr 1.0e-04 grad_norm {kind:.3f}"
        elif kind < 0.75:
            spent_ms = 1200 + 100 * kind
            yield (
                "out",
                f" iteration {number:8d}/ 5000 | consumed samples: {number * 256:12d} | elapsed time per iteration "
                f"(ms): {spent_ms:.1f} | learning rate: 1.000E-04 | global batch size: 256 | lm loss: {3 - kind:.6E} | "
                "number of skipped iterations: 0 |",
            )
        elif kind < 0.9:
            yield "err", f"[INFO] 2026-11-20 10:00:00,551 [trainer.py:{number % 400}] rank {rank} loaded batch {number}"
        else:
            text = WARNINGS[int(kind * 1000) % len(WARNINGS)]
            yield "err", text.replace("{number}", str(number)).replace("{rank}", str(rank))


PLOG = (
    "[ERROR] HCCL({pid},python):{plog} [task_exception_handler.cc:704] [{pid}][TaskExecStage][Timeout][Host]Task run "
    "failed, opData information is timeStamp:[{plog}], deviceId[{dev}], index[{number}], count[256], reduceType[sum].",
    "[ERROR] RUNTIME({pid},python):{plog} [stream.cc:1120]{pid} GetError:[DFX_INFO]Stream Synchronize failed, "
    "stream_id={number}, retCode=0x91, [the model stream execute failed].",
    "[ERROR] ASCENDCL({pid},python):{plog} [log_inner.cpp:345]{pid} ReportCallError: [AIC_INFO] after execute: "
    "args print end, task {number}",
    "[EVENT] HCCL({pid},python):{plog} [op_base.cc:300] [{pid}]Entry-HcclAllReduce: EI0000 tag[AllReduce_{number}]",
    "[ERROR] DRV({pid},python):{plog} [ascend][curpid: {pid}][drv][devmm][DevmmSvmIoctl {number}]<errno:12> Out of svm",
    "[INFO] HCCL({pid},python):{plog} [hccl_socket_manager.cc:9] [{pid}]logicDevId[{dev}], deviceIp[192.168.1.{dev}]",
)


@cache
def _plog(count: int, rank: int) -> Sequence[str]:
    drawn, found = random.Random(rank), []
    for number in range(count):
        at_s = BEGAN_S + FAILED_S - (count - number) * STEP_S
        at = time.strftime("%Y-%m-%d-%H:%M:%S", time.gmtime(at_s)) + f".{number % 1000:03d}.117"
        texts = {"pid": str(40000 + rank), "dev": str(rank % PER_HOST), "plog": at, "number": str(number)}
        found.append(_filled(drawn.choice(PLOG), texts))
    return found


# ---------------------------------------------------------------- ends

Ends = Mapping[str, list[str]]
_FRAMES = """Traceback (most recent call last):
  File "/job/train.py", line 88, in <module>
    main()
  File "/job/train.py", line 61, in main
    {statement}
"""
_REPORT = """EI0002: [PID: {pid}] {plog} The wait execution of the Notify register times out. Reason: The Notify \
register has not received the Notify record from remote rank [unknown].
        Possible Cause: 1. An exception occurs during the execution on some NPUs in the cluster.
[ERROR] 2026-11-20-10:00:00 (PID:{pid}, Device:{dev}, RankID:{rank}) ERR02200 DIST call hccl api failed.
"""
_MEMORY = (
    "{at}RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU {dev}; 60.97 GiB total capacity; 57.12 GiB "
    "already allocated; 57.12 GiB current active; 1.02 GiB free; 58.40 GiB reserved in total by PyTorch)"
)
_LOST = (
    "{at}RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:41022"
)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _lines(text: str, values: Mapping[str, str]) -> list[str]:
    return _filled(text, values).splitlines()


def _mixed(is_first: bool, texts: Mapping[str, str]) -> Ends:
    """One rank is out of memory; the others report, with tracebacks, that it closed its connections."""
    if is_first:
        return {"err": _lines(_FRAMES + _MEMORY, {**texts, "statement": "loss.backward()", "at": ""})}
    whole = "".join(f"[rank{{rank}}]: {line}\n" for line in _FRAMES.splitlines()) + _LOST
    return {"err": _lines(whole, {**texts, "statement": "dist.all_reduce(loss)", "at": "[rank{rank}]: ", **texts})}


def _bare(is_first: bool, texts: Mapping[str, str]) -> Ends:
    """The same without any traceback."""
    values = {"at": f"2026-11-20 10:00:00,551 - train - ERROR - [rank {texts['rank']}] ", **texts}
    return {"err": _lines(_MEMORY if is_first else _LOST, values)}


def _in_plog(is_first: bool, texts: Mapping[str, str]) -> Ends:
    """One rank has a fault of its device; the wait of the others times out."""
    if not is_first:
        found = _lines(PLOG[0].replace("{number}", "21"), texts)
        return {"err": _lines(_REPORT, texts), "plog": found}
    fault = (
        "[ERROR] RUNTIME({pid},python):{plog} [device_error_proc.cc:9]{pid} report error module_type=5: HBM ECC error"
    )
    raised = "RuntimeError: NPU function error: c10_npu::synchronize, error code is 507054"
    whole = _FRAMES + raised
    return {"err": _lines(whole, {**texts, "statement": "torch.npu.synchronize()"}), "plog": _lines(fault, texts)}


SHAPES: Mapping[str, Callable[[bool, Mapping[str, str]], Ends]] = {"mixed": _mixed, "bare": _bare, "plog": _in_plog}
