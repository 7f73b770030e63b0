"""Support archive of a job, and its analysis by Huawei's tool if that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.logs.log_lines import merge, process_name
from ascendrun.core.notices import NoticeSettings
from ascendrun.core.records import as_record
from ascendrun.head.command import run_session
from ascendrun.head.spool.artifact_store import read_artifacts
from ascendrun.head.spool.spool_files import find_streams
from ascendrun.query.bundle.archive import (
    Contents,
    Piece,
    cannot_write,
    file_piece,
    make_archive,
    text_piece,
    write_archive,
)
from ascendrun.query.bundle.contents import LeftOut, Subject, collect, make_redactor, read_samples
from ascendrun.query.explain import explain_job
from ascendrun.query.log_reader import StreamReader
from ascendrun.query.report_reader import read_report
from ascendrun.query.views import find_job
from ascendrun.text import Text
from ascendrun.text.format import grouped


@dataclass(frozen=True)
class Bundle:
    """A support archive. `path` None: it was not written. `parsed`: the result of `ascend-fd parse` for each node's
    directory, () if that tool is not installed; its output is in `parsed_dir`."""

    contents: Contents
    path: Path | None = None
    archive_bytes: int = 0
    sha256: str | None = None
    parsed: tuple[Parsed, ...] = ()
    parsed_dir: Path | None = None


def bundle_job(
    state_dir: Path,
    ref: str,
    path: Path | None,
    *,
    layout: str,
    with_logs: bool,
    max_bytes: int,
    is_dry: bool,
    notices: NoticeSettings | None,
    environ: Mapping[str, str],
) -> Bundle:
    """Make the archive, as `Diagnosis.bundle`. Raises NotFoundError, ConflictError, StoreUnusableError,
    CannotWriteError."""
    stored, events = find_job(state_dir, ref)
    subject = Subject(stored, events, state_dir)
    job = stored.job
    left_out: LeftOut = []
    redactor = make_redactor(subject, environ, notices, left_out)
    if layout == "ascend-fd":
        pieces = collect_for_faultdiag(subject, left_out)
    else:
        pieces = collect(
            subject, extras=_views(subject, left_out), with_logs=with_logs, left_out=left_out, redactor=redactor
        )
    facts = {"job": job.id, "name": job.name, "state": job.state.value, "attempt": job.attempt, "layout": layout}

    def write(out: IO[bytes] | None) -> Contents:
        return make_archive(
            pieces,
            redactor,
            root=f"ascendrun-{job.id}",
            facts=facts,
            max_bytes=max_bytes,
            left_out=left_out,
            out=out,
            mtime_s=int(job.created_at_s),
        )

    if is_dry:
        return Bundle(write(None))
    path = path or Path(f"{layout}-{job.id}.tar.gz")
    try:
        contents, sha256 = write_archive(path, write)
        done = Bundle(contents, path, path.stat().st_size, sha256)
        tool = shutil.which(TOOL) if layout == "ascend-fd" else None
        if tool is None:
            return done
        out = path.with_name(f"{path.name.partition('.')[0]}-ascend-fd")
        return replace(done, parsed=tuple(run_parse(tool, path, out, nodes=job.used_hosts)), parsed_dir=out / "parsed")
    except OSError as error:
        raise cannot_write(path, error) from error


def _views(subject: Subject, left_out: LeftOut) -> Mapping[str, str]:
    """Return the output of `explain` and `report` as of the last event of the job, so that it is reproducible."""
    job_id, state_dir = subject.stored.job.id, subject.state_dir
    now_s = subject.events[-1].at_s if subject.events else subject.stored.job.created_at_s
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("explain.json", lambda: explain_job(state_dir, job_id, now_s=now_s)),
        ("report.json", lambda: read_report(state_dir, job_id, now_s=now_s)),
    ]
    texts: dict[str, str] = {}
    for name, make in makers:
        try:
            texts[name] = json.dumps(as_record(make()), indent=1, ensure_ascii=False) + "\n"
        except AscendrunError as error:
            left_out.append((name, error.message))
        except Exception as error:  # a broken view must not prevent the archive, which lists it
            why = f"{type(error).__name__}: {error}"
            left_out.append((name, Text("bundle.view-failed", "internal error: {error}", error=why)))
    return texts


TOOL = "ascend-fd"
TOOL_S = 900.0
TAIL_LINES = 50_000
OUTPUT_SHOWN = 2000
_NPU_SMI, _HCCN = "/usr/local/bin/npu-smi", "/usr/local/Ascend/driver/tools/hccn_tool"
_SECTION = re.compile(r"^@@ (\S+) (\d+)\n(.*?)^@@= \d+$", re.M | re.S)
_PLOG = re.compile(r"(?:^|/)((?:debug|run)/(?:plog|device-\d+)/[^/]+)$")


@dataclass(frozen=True)
class Parsed:
    """The result of `ascend-fd parse` for the directory of one node. `code` None: it did not run, or timed out."""

    node: str
    code: int | None
    output: Text | str


def collect_for_faultdiag(subject: Subject, left_out: LeftOut) -> list[Piece]:
    """Return the pieces of the newest attempt with files on this machine, in the layout for `ascend-fd parse`.

    Layout and command as MindCluster FaultDiag documents them (hiascend.com mindcluster 7.3.0 "Log Collection Directory
    Structure" and gitcode.com/Ascend/mind-cluster docs/en/faultdiag, read in 2026):

        <node>/rank-<id>.txt                                 output of a rank; the tool reads the last 1 MB
        <node>/process_log/{debug,run}/plog/plog-<pid>_<time>.log, .../device-<id>/device-<pid>_<time>.log
        <node>/dmesg
        <node>/environment_check/npu_info_after.txt         command lines of npu-smi and hccn_tool, each with its output
        <node>/environment_check/npu_smi_<npu>_details.csv   time,dev_id,hbm_rate,aicore_rate,rated_freq,freq,temp,power

    Each directory has the files of one machine and is parsed separately: `ascend-fd parse -i <node> -o <out>`; then
    `ascend-fd diag -i <directory with all outs> -o <report>`. Not written: npu_info_before.txt (not recorded before a
    start in that form), npu_<id>_details.csv (port counters in time), host_metrics_<cores>.json, device_log (needs
    msnpureport as root), dl_log, mindie, amct_log, messages (of components that this cluster does not run or that need
    root). Not verified: the tool itself was never run on such a directory; `rated_freq` is left empty, since it is not
    measured, and `npu-smi info -c 0` is written if the chip was not queried by number.
    """
    attempts = list(subject.attempts)
    if not attempts:
        left_out.append(("*", Text("bundle.no-attempt", "no attempt has saved files on this machine")))
        return []
    attempt, folder = attempts[-1]
    pieces: list[Piece] = []
    for node in subject.stored.job.hosts_of(attempt):
        pieces += _console_logs(folder, attempt, node)
        pieces += _gathered(folder, node, left_out)
    pieces += _device_tables(subject, left_out)
    for what, why in (
        ("device_log", Text("bundle.needs-root", "requires msnpureport as root on the node")),
        ("dl_log, mindie, amct_log", Text("bundle.not-used", "logs of components that ascendrun does not use")),
        ("npu_info_before.txt", Text("bundle.not-recorded", "not recorded before a start")),
    ):
        left_out.append((what, why))
    return pieces


def _console_logs(folder: Path, attempt: int, node: str) -> Iterator[Piece]:
    """Yield both outputs of a rank in the order of arrival of their lines."""
    streams = sorted(find_streams(folder, attempt, hosts=[node]), key=lambda files: files.rank)
    for rank, files in groupby(streams, key=lambda files: files.rank):
        lines = merge(chain.from_iterable(StreamReader(one, tail=TAIL_LINES).batches(final=True)) for one in files)
        yield text_piece(f"{node}/{process_name(rank)}.txt", "".join(f"{line.text}\n" for line in lines))


def _gathered(folder: Path, node: str, left_out: LeftOut) -> Iterator[Piece]:
    gathered = read_artifacts(folder, node)
    if gathered.at_s is None:
        why = Text("bundle.not-collected", "not collected; `ascendrun explain --collect JOB` collects it")
        left_out.append((f"{node}: process_log, dmesg, environment_check", why))
    checks: list[str] = []
    for file in gathered.files:
        try:
            if file.name in ("plog", "device-log"):
                place = _PLOG.search(file.file) or _PLOG.search(file.source)
                if place:
                    yield file_piece(f"{node}/process_log/{place.group(1)}", [file.path])
            elif file.name == "dmesg":
                yield file_piece(f"{node}/dmesg", [file.path])
            elif file.name in ("npu-smi", "hccn"):
                checks.append(as_commands(file.path.read_text("utf-8", "replace"), is_port=file.name == "hccn"))
        except OSError as error:
            reason = error.strerror or str(error)
            unreadable = Text("bundle.collected-unreadable", "cannot read the file: {why}", why=reason)
            left_out.append((f"{node}: {file.name}/{file.file}", unreadable))
    left_out.extend((f"{node}: {name}", problem) for name, problem in gathered.problems)
    if any(checks):
        yield text_piece(f"{node}/environment_check/npu_info_after.txt", "\n".join(checks))


def as_commands(text: str, *, is_port: bool) -> str:
    """Return collected output in the form of the tool: the complete command, its output, an empty line."""
    sections = _SECTION.findall(text)
    if not sections:
        return f"{_NPU_SMI} info\n{text.strip()}\n" if not is_port and text.strip() else ""
    lines = []
    for view, number, answer in sections:
        chip = " -c 0" if view == "health" else ""
        command = f"{_HCCN} -i {number} -{view} -g" if is_port else f"{_NPU_SMI} info -i {number}{chip} -t {view}"
        lines.append(f"{command}\n{answer.strip()}\n")
    return "\n".join(lines)


def _device_tables(subject: Subject, left_out: LeftOut) -> Iterator[Piece]:
    measured_by = read_samples(subject, left_out).get("devices", ())
    by_device = grouped(((one.host, one.device), one) for one in measured_by if one.device_type == "npu")
    for (host, device), samples in sorted(by_device.items()):
        rows = ["time,dev_id,hbm_rate,aicore_rate,rated_freq,freq,temp,power"]
        for sample in samples:
            used = ""
            if sample.memory_used_bytes is not None and sample.memory_total_bytes:
                used = f"{100 * sample.memory_used_bytes / sample.memory_total_bytes:.0f}"
            measured = map(_number, (sample.frequency_mhz, sample.temperature_c, sample.power_w))
            row = (str(int(sample.at_s)), str(device), used, _number(sample.utilisation), "", *measured)
            rows.append(",".join(row))
        yield text_piece(f"{host}/environment_check/npu_smi_{device}_details.csv", "\n".join(rows) + "\n")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


# ---------------------------------------------------------------- the tool


def run_parse(tool: str, archive: Path, out: Path, *, nodes: Sequence[str]) -> list[Parsed]:
    """Unpack the archive under `out` and have the tool parse the directory of every node into `out`/parsed/<node>.

    Raises OSError.
    """
    results = []
    out.mkdir(mode=0o700, exist_ok=True)
    root = out / _unpack(archive, out)
    for node in nodes:
        folder, parsed = root / node, out / "parsed" / node
        if folder.is_dir():
            parsed.mkdir(parents=True, exist_ok=True)
            results.append(_run(tool, node, folder, parsed))
    return results


def _unpack(archive: Path, out: Path) -> str:
    """Write the files of an archive of ascendrun; return the name of its one directory."""
    root = ""
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            parts = Path(member.name).parts
            if file is None or ".." in parts or member.name.startswith("/"):
                raise OSError(f"{archive} has an unsafe member: {member.name!r}")
            root = parts[0]
            target = out.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            target.write_bytes(file.read())
    return root


def _run(tool: str, node: str, folder: Path, parsed: Path) -> Parsed:
    try:
        end = run_session(
            [tool, "parse", "-i", str(folder), "-o", str(parsed)], stdin=b"", env=os.environ, timeout_s=TOOL_S
        )
    except OSError as error:
        return Parsed(node, None, Text("bundle.tool-failed", "cannot run the tool: {reason}", reason=str(error)))
    return Parsed(node, end.code, end.output.decode("utf-8", "replace").strip()[-OUTPUT_SHOWN:])
