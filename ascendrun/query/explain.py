"""Diagnosis of a job by its name: finds the attempt, reads its evidence, calls the pure diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.core.events import Event
    from ascendrun.health.diagnosis import Diagnosis
    from ascendrun.text import Text

SLOW_SHOWN = 3


@dataclass(frozen=True)
class Explanation:
    """Why one attempt of a job ended, or its state. `attempts`: the number of attempts so far."""

    id: str
    name: str
    state: str
    attempt: int
    attempts: int
    diagnosis: Diagnosis


def explain_job(
    state_dir: Path,
    ref: str,
    *,
    attempt: int | None = None,
    lang: str | None = None,
    now_s: float,
    liveness: Mapping[str, Mapping[str, str]] | None = None,
) -> Explanation:
    """Explain a job. `ref`: a job id, name or the start of an id. `attempt` None: the newest with any evidence. `lang`
    None: that of the process. `liveness`: {job id: {host: liveness}} from the controller. Raises NotFoundError,
    ConflictError, StoreUnusableError."""
    from ascendrun.head.state.store import Store
    from ascendrun.health.diagnosis import diagnose, render
    from ascendrun.query.evidence import attempt_to_explain, read_evidence
    from ascendrun.query.views import choose_attempt

    with Store.open_for_reading(state_dir) as store:
        stored = store.find(ref)
        events = store.events(stored.job.id)
    job = stored.job
    number = attempt_to_explain(job) if attempt is None else choose_attempt(job, attempt)
    slow = slow_now(events) if job.state.value == "RUNNING" and number == job.attempt else ()
    evidence = read_evidence(
        state_dir, stored, events, attempt=number, now_s=now_s, slow=slow, liveness=(liveness or {}).get(job.id)
    )
    return Explanation(job.id, job.name, job.state.value, number, job.attempt, render(diagnose(evidence), lang))


def slow_now(events: Sequence[Event]) -> tuple[Text, ...]:
    """Return the stragglers reported since the last time that all ranks were equally fast."""
    found: list[Text] = []
    for event in events:
        if event.code == "straggler":
            found.append(event.message())
        elif event.code == "straggler-resolved":
            found.clear()
    return tuple(found[-SLOW_SHOWN:])


def summary_line(state_dir: Path, ref: str, *, lang: str | None = None, now_s: float) -> str | None:
    """Return one sentence about a failed job, with the confidence; None: only its reason is known."""
    from ascendrun.health.diagnosis import Confidence
    from ascendrun.health.diagnosis.render import CONFIDENCE
    from ascendrun.text import language

    found = explain_job(state_dir, ref, lang=lang, now_s=now_s).diagnosis
    if found.confidence is Confidence.UNKNOWN or not found.message:
        return None
    return f"{found.message} [{CONFIDENCE[found.confidence].render(lang or language())}]"
