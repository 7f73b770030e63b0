"""Measurement of claims about NPUs on a site's devices, by two small jobs, and the archive of all outputs."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.hosts import Host
from ascendrun.core.logs.redaction import Redactor
from ascendrun.core.records import as_record
from ascendrun.health import verify
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.health.verify import Claim, ClaimOutcome
from ascendrun.planner.cost import ASSUMED, CONTEXT
from ascendrun.query.bundle.archive import Piece, cannot_write, json_piece, make_archive, text_piece, write_archive
from ascendrun.query.bundle.contents import versions
from ascendrun.query.deep_check import Bench
from ascendrun.text import Text

HELD_S = 600.0
"""Seconds of the second job, which is killed before."""
SEEN_S, RELEASED_S, POLL_S = 120.0, 60.0, 1.0

Survey = Callable[[], Mapping[str, NodeFacts]]
"""Returns the table of npu-smi and the leases of each reachable host, now."""


def measure_claims(
    bench: Bench, hosts: Sequence[Host], survey: Survey, log: Callable[[str], None]
) -> tuple[Claim, ...]:
    """Run the jobs on all hosts together and return a claim for each name of CLAIMS."""
    names = tuple(host.name for host in hosts)
    before = survey()
    memory = verify.memory_of(before)
    log(str(Text("verify.progress-start", "starting ranks on {count:plural host hosts}", count=len(hosts))))
    began_s = time.monotonic()
    outcome = bench.run([names], burn_s=bench.options.burn_s)[0]
    wall_s = round(time.monotonic() - began_s, 1)
    if outcome.why is not None:
        rest = verify.unmeasured(Text("verify.no-ranks", "no ranks to measure"), *list(verify.CLAIMS)[1:])
        return (Claim("hccl-start", ClaimOutcome.FAILED, outcome.why), *rest)
    lines = [line for of_host in outcome.lines.values() for line in of_host]
    exchanged = sorted({str(line["measured"]) for line in lines if line.get("measured") in ("node", "rail", "mesh")})
    started = Claim("hccl-start", ClaimOutcome.MEASURED, None, {"job_s": wall_s, "exchanges": exchanged})
    speeds = {
        host: statistics.median(float(line["tflops"]) for line in found if line.get("measured") == "device")
        for host, found in outcome.lines.items()
        if any(line.get("measured") == "device" for line in found)
    }
    claims = [started, verify.claim_speed(speeds, before, ASSUMED["npu"])]
    if not any(memory.values()):
        why = Text("verify.no-devices", "no NPU reports its memory")
        return (*claims, *verify.unmeasured(why, *list(verify.CLAIMS)[2:]))
    log(str(Text("verify.progress-kill", "starting ranks and killing them")))
    job = bench.start(names, burn_s=HELD_S)
    planned = {host: sum(line.get("measured") == "device" for line in found) for host, found in outcome.lines.items()}
    try:
        during = _until(survey, lambda now: verify.claim_lease(now, planned).outcome is ClaimOutcome.MEASURED, SEEN_S)
    finally:
        bench.stop(job)
    taken_mb = verify.taken_mb(memory, verify.memory_of(during))
    killed_s = time.monotonic()
    after = _until(survey, lambda now: _is_free(memory, now), RELEASED_S)
    outcome_of = ClaimOutcome.MEASURED if _is_free(memory, after) else ClaimOutcome.FAILED
    values = {"seconds": round(time.monotonic() - killed_s, 1), "taken_mb": taken_mb}
    assumed_mb = CONTEXT["npu"] >> 20
    return (
        *claims,
        verify.claim_lease(during, planned),
        Claim("plan-memory", ClaimOutcome.MEASURED, None, {"taken_mb": taken_mb, "assumed_context_mb": assumed_mb}),
        Claim("memory-release", outcome_of, None, values),
    )


def _is_free(memory: Mapping[str, Mapping[int, int]], now: Mapping[str, NodeFacts]) -> bool:
    more = verify.taken_mb(memory, verify.memory_of(now))
    return more is not None and more <= verify.RELEASED_MB


def _until(survey: Survey, is_so: Callable[[Mapping[str, NodeFacts]], bool], limit_s: float) -> Mapping[str, NodeFacts]:
    """Return the first survey that is so, or the last one within the limit."""
    until = time.monotonic() + limit_s
    while True:
        now = survey()
        if is_so(now) or time.monotonic() > until:
            return now
        time.sleep(POLL_S)


# ---------------------------------------------------------------- the archive

SECRET_PROBES = ("environ",)
"""Variables of users: not in the archive."""
MOST_BYTES = 50 * 1024 * 1024


def write_outputs(
    path: Path, report: verify.VerifyReport, outputs: Iterable[verify.Output], results: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the report, each output of a tool below recordings/KIND and each other probe below raw/HOST, without
    credentials. Raises CannotWriteError."""
    pieces: list[Piece] = [json_piece("report.json", as_record(report)), json_piece("versions.json", versions())]
    for reading, text in outputs:
        if reading.kind != "probe":
            name = re.sub("[^A-Za-z0-9._-]", "-", f"{reading.host}-{reading.label}")
            pieces.append(text_piece(f"recordings/{reading.kind}/{name}.txt", text))
    for host, raw in results.items():
        kept = {probe: value for probe, value in raw.items() if probe not in SECRET_PROBES}
        pieces.append(json_piece(f"raw/{host}.json", kept))
    write = partial(
        make_archive, pieces, Redactor(), root="ascendrun-verify", facts={"hosts": len(results)}, max_bytes=MOST_BYTES
    )
    try:
        write_archive(path, lambda out: write(out=out))
    except OSError as error:
        raise cannot_write(path, error) from error
