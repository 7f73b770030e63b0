"""Kind of a diagnosed failure, for the restart policy: a table by code, else by the catalogue of known errors."""

from __future__ import annotations

from collections.abc import Mapping

from ascendrun.ascend.signatures import Signature, signature_of
from ascendrun.core.jobs.job import Exit
from ascendrun.core.jobs.outcome import exit_reason
from ascendrun.core.jobs.reasons import LOST, FirstFailure, Reason, because
from ascendrun.core.jobs.restart import Failure, Kind
from ascendrun.health.diagnosis.evidence import Evidence
from ascendrun.health.diagnosis.result import Diagnosis

_CODES: Mapping[Kind, str] = {
    Kind.INFRA: "node-rebooted node-directory-gone node-unreachable supervisor-lost start-timeout preflight-failed "
    "host-memory-error memory-page-broken hang-unreachable",
    Kind.DEVICE: "device-alarm",
    Kind.HCCL: "late-rank ranks-missing wait-chain link-broken most-reported peer-lost",
    Kind.HANG: "hang rank-unresponsive lagging collective-not-reached watchdog-stuck",
    Kind.OOM: "host-oom host-oom-killer cgroup-oom-killer oom-killer-report dataloader-worker-killed "
    "process-pool-broken python-memory",
    Kind.PREEMPTED: "preempted slurm-preempted",
    Kind.UNKNOWN: "exit-code killed terminated interrupted crash unknown",
    Kind.USER: "exception start-failed collective-differs world-size-wrong finished-early wait-cycle "
    "separate-trainings master-address-local own-address-local python-stop python-eof",
}
KINDS: Mapping[str, Kind] = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
"""Kinds by code of a diagnosis. Codes of the catalogue that are not here are classed by `_kind_of`."""

RETRIES: Mapping[str, str] = {
    **dict.fromkeys("killed crash host-oom node-rebooted node-directory-gone supervisor-lost".split(), "same"),
    **dict.fromkeys("time-limit start-timeout head-restarted preempted hang hang-unreachable".split(), "same"),
    **dict.fromkeys("start-failed preflight-failed stage-files-lost separate-trainings".split(), "never"),
    "device-alarm": "exclude",
}
"""Whether another attempt helps, by code of a diagnosis. Other codes are those of the catalogue, with its own word."""
RULE_RETRIES: Mapping[str, str] = {
    **dict.fromkeys("rank-unresponsive node-unreachable late-rank".split(), "same"),
    **dict.fromkeys("EI0013 nccl-ib-completion hccl-root-unreachable no-route".split(), "exclude"),
    **dict.fromkeys("link-broken name-not-resolved master-unreachable".split(), "exclude"),
    **dict.fromkeys("EI0005 EI0016 collectives-mismatch models-differ collective-differs".split(), "never"),
    **dict.fromkeys("world-size-wrong finished-early own-address-local master-address-local".split(), "never"),
}
"""The same for conclusions from several ranks, whose code may be a single line's too."""

REFUSED = 78
"""Exit code of a rank that refuses what it was given, EX_CONFIG of sysexits.h: another attempt is given the same."""
_DEVICE_FAMILIES = frozenset({"acl", "cann", "cuda", "driver", "torch_npu"})
_NETWORK_FAMILIES = frozenset({"hccl", "nccl", "gloo", "network"})


def failure_of(found: Diagnosis, evidence: Evidence) -> Failure:
    """Return the failure that a diagnosis describes, for the restart policy."""
    signature = signature_of(found.code)
    kind = KINDS.get(found.code) or (Kind.UNKNOWN if signature is None else _kind_of(signature))
    retry = found.retry
    if any(one.code == REFUSED for one in evidence.ranks if one.rank in found.ranks):
        kind, retry = Kind.USER, "never"
    own = signature is not None and signature.blames == "node" and signature.role == "cause"
    seen = any(host.devices or host.reachable is False for host in evidence.hosts if host.host in found.hosts)
    return Failure(kind, found.code, found.hosts, found.ranks, found.confidence.value, retry, is_proven=own or seen)


def retry_of(code: str) -> str:
    """Return whether another attempt helps: same, exclude (without its hosts), never, unknown."""
    row = signature_of(code)
    return RETRIES.get(code) or ("unknown" if row is None else row.retry)


def first_of(found: Diagnosis, evidence: Evidence) -> FirstFailure:
    """Return what failed first by a diagnosis, as every output names it."""
    return FirstFailure(_reason(found, evidence), found.confidence.value)


def _reason(found: Diagnosis, evidence: Evidence) -> Reason:
    if found.code in LOST.values():
        return because(found.code, found.hosts, found.ranks)
    if not found.ranks:
        return because("hosts-failed", found.hosts) if found.hosts else because("first-unknown")
    rank = next((one for one in evidence.ranks if one.rank == found.ranks[0]), None)
    if rank is not None and len(found.ranks) == 1:
        if rank.start_failed is not None:
            return because("rank-start-failed", [rank.host], found.ranks, rank.start_failed)
        if rank.code or (rank.signal is not None and not rank.stopped):  # a code is its own, also during a stop
            end = exit_reason(rank.rank, rank.host, Exit(rank.code, rank.signal, 0))
            return because(end.code, found.hosts, found.ranks, **end.values)
        return because("rank-failed", found.hosts, found.ranks)
    return because("ranks-failed", found.hosts, found.ranks)


def _kind_of(row: Signature) -> Kind:
    """Return the kind of a known error: what fails again is an error of the program or its environment."""
    if row.retry == "never" or row.blames == "job":
        return Kind.USER
    if row.family == "storage":
        return Kind.STORAGE
    if row.family in _NETWORK_FAMILIES or row.blames in ("network", "peer"):
        return Kind.HCCL
    if row.blames == "node":
        return Kind.DEVICE if row.family in _DEVICE_FAMILIES else Kind.INFRA
    return Kind.USER if row.family in ("python", "data", "numeric", "model") else Kind.UNKNOWN
