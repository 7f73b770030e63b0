"""A case of the corpus as the head would have it: a store, a spool with the ranks' files, clocks, gathered logs."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corpus import BEGAN_S, Case

from ascendrun.core.jobs.job import Cause, Exit, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.spool.clocks import Reading, keep_reading
from ascendrun.head.state.state_dir import SPOOL_FACTS, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.health.diagnosis import Evidence, HostEvidence, Line, RankEvidence
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS


def spool_case(case: Case, state_dir: Path) -> str:
    """Returns the job's id."""
    evidence = case.evidence
    store = Store.open(state_dir)
    try:
        job = store.jobs.add(
            key=case.name,
            make_job=lambda job_id, head_id: make_job(evidence, job_id, head_id),
            spec={
                "name": case.name,
                "devices": {"type": evidence.device_type},
                "launcher": "none" if evidence.launcher in LAUNCHERS else evidence.launcher,
                "env": {},
            },
            hosts=[{"name": host.host, "addr": host.addresses[0]} for host in evidence.hosts],
            trees=[],
            file=None,
            now_s=BEGAN_S,
        )
        store.jobs.save(job, evidence.events, now_s=BEGAN_S + 300)
    finally:
        store.close()
    folder = spool_dir(state_dir, job.id, 1)
    folder.mkdir(parents=True)
    facts = {host.host: host.facts for host in evidence.hosts if host.facts}
    (folder / SPOOL_FACTS).write_text(json.dumps(facts))
    for host in evidence.hosts:
        _spool_host(folder / host.host, evidence, host)
    for rank in evidence.ranks:
        _spool_rank(folder / rank.host, rank)
    return job.id


def make_job(evidence: Evidence, job_id: str, head_id: str) -> Job:
    nodes = tuple(
        NodeProgress(
            host=host.host,
            node_rank=number,
            phase=Phase.LOST if host.lost else Phase.ENDED,
            lost=host.lost,
            boot_id="b",
            ranks=tuple(rank.rank for rank in evidence.ranks_of(host.host)),
            exits={
                rank.rank: Exit(rank.code, rank.signal, int((rank.exited_at_s or 0) * 1e9), rank.stopped)
                for rank in evidence.ranks_of(host.host)
                if rank.has_ended
            },
        )
        for number, host in enumerate(evidence.hosts)
    )
    hosts = tuple(host.host for host in evidence.hosts)
    return Job(
        id=job_id,
        name=evidence.name,
        run=f"{head_id}-{job_id}",
        hosts=hosts,
        grace_s=30.0,
        start_s=60.0,
        created_at_s=BEGAN_S,
        state=State(evidence.state),
        reason=evidence.reason or because("new"),
        nodes=nodes,
        world_size=evidence.world_size,
        go_sent_at_s=BEGAN_S,
        started_at_s=BEGAN_S,
        ended_at_s=evidence.ended_at_s,
        cause=Cause(evidence.cause) if evidence.cause else None,
        unconfirmed=tuple(host.host for host in evidence.hosts if host.reachable is False),
    )


def _spool_host(folder: Path, evidence: Evidence, host: HostEvidence) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if host.clock.error_s is not None:
        offset_s = -host.clock.to_head_s(0.0)
        keep_reading(folder, Reading(BEGAN_S + 10, offset_s, host.clock.error_s))
    events: list[dict[str, Any]] = [{"event": "supervising", "at_ns": 0, "pid": 1, "boot_id": "b"}]
    for local, rank in enumerate(evidence.ranks_of(host.host)):
        events.append({"event": "rank_started", "at_ns": 0, "rank": rank.rank, "local_rank": local, "pid": rank.pid})
    for rank in evidence.ranks_of(host.host):
        if rank.start_failed:
            events.append({"event": "start_failed", "at_ns": 0, "rank": rank.rank, "message": rank.start_failed})
        if rank.has_ended:
            at_ns = int((rank.exited_at_s or 0) * 1e9)
            end = {name: getattr(rank, name) for name in ("rank", "code", "signal", "stopped")}
            events.append({"event": "rank_exited", "at_ns": at_ns, "exited_ns": at_ns, **end})
    if host.stopped_at_s is not None:
        events.append({"event": "stopping", "at_ns": int(host.stopped_at_s * 1e9), "by": "failure", "reason": "x"})
    if host.has_ended:
        events.append({"event": "ended", "at_ns": 0, "leftovers": []})
    (folder / "events.0").write_text("".join(json.dumps(event) + "\n" for event in events))
    _gather(folder / "gathered", evidence, host)


def _gather(folder: Path, evidence: Evidence, host: HostEvidence) -> None:
    """dmesg, plogs, and device tables as the gatherer leaves them."""
    texts: dict[str, dict[str, str]] = {}
    if host.dmesg is not None:
        texts["dmesg"] = {"excerpt.txt": "".join(f"{line.text}\n" for line in host.dmesg)}
    for rank in evidence.ranks_of(host.host):
        if rank.plog is not None:
            name = f"debug_plog_plog-{rank.pid}_20261120100000.log"
            texts.setdefault("plog", {})[name] = "".join(f"{line.text}\n" for line in rank.plog)
    files = []
    for name, of_name in texts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, text in of_name.items():
            (folder / name / file).write_text(text)
            files.append({"name": name, "file": file, "source": "x", "bytes": len(text.encode())})
    folder.mkdir(exist_ok=True)
    index: Mapping[str, Any] = {"at_ns": 1, "start_ns": 1, "boot_ns": 0, "files": files, "problems": []}
    (folder / "index.json").write_text(json.dumps(index))


def _spool_rank(folder: Path, rank: RankEvidence) -> None:
    streams: dict[str, list[Line]] = {}
    for line in rank.lines:
        streams.setdefault(line.stream, []).append(line)
    for stream, lines in streams.items():
        data, times = b"", b""
        for line in lines:
            data += line.text.encode() + b"\n"
            if line.at_s is not None:
                times += struct.pack(">QQ", len(data), int(line.at_s * 1e9))
        (folder / f"rank-{rank.rank}.{stream}.0").write_bytes(data)
        if times:
            (folder / f"rank-{rank.rank}.{stream}.times.0").write_bytes(times)
    if rank.error:
        stack = "\n".join(line.text for line in rank.error)
        extra = {"py_callstack": stack, "timestamp": str(int(rank.error[0].at_s or 1790000100))}
        whole = {"message": {"message": rank.error[-1].text, "extraInfo": extra}}
        (folder / f"rank-{rank.rank}.error.0").write_text(json.dumps(whole))
