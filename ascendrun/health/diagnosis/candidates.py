"""Who may have been first, and why: what the ranks' stories and the hosts' facts put forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ascendrun.health.diagnosis.clues import CREDIBLE, STRENGTH, SYMPTOM, Clue
from ascendrun.health.diagnosis.evidence import Evidence, HostEvidence
from ascendrun.health.diagnosis.stories import RankStory
from ascendrun.health.diagnosis.times import Moment, earliest
from ascendrun.health.diagnosis.verdict import Proof

PROOFS_LIMIT = 6


@dataclass(frozen=True)
class Candidate:
    """`ranks`: with one and the same reason, the earliest first told of in `at`. `sure`: the reason itself is a fact.
    `doubts`: why it may be wrong all the same. `is_vague`: how it ended is known, why is not."""

    code: str
    strength: int
    ranks: Tuple[int, ...] = ()
    hosts: Tuple[str, ...] = ()
    at: Optional[Moment] = None
    proofs: Tuple[Proof, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    retry: str = "unknown"
    blames: str = "self"
    sure: bool = True
    is_vague: bool = False
    doubts: Tuple[str, ...] = ()

    @property
    def is_credible(self) -> bool:
        return self.strength >= CREDIBLE


def candidates_of(evidence: Evidence, stories: Sequence[RankStory]) -> Tuple[Candidate, ...]:
    """Of ranks that have a reason of their own, those with the same one together; then hosts and devices."""
    groups: Dict[str, List[Clue]] = {}
    for story in stories:
        if story.own is not None and story.has_cause:
            groups.setdefault(story.own.sameness, []).append(story.own)
    found = [make_candidate(clues) for clues in groups.values()]
    found.extend(_of_symptoms(stories))
    hosts = [one for host in evidence.hosts for one in _of_host(evidence, host)]
    return (*found, *hosts, *_of_devices(evidence, stories, found))


def _of_symptoms(stories: Sequence[RankStory]) -> List[Candidate]:
    """Ranks that broke by themselves, waiting for nobody, with words that tell where but not why."""
    groups: Dict[str, List[Clue]] = {}
    for story in stories:
        own = story.own
        if own is not None and own.role == SYMPTOM and story.waited is None and story.rank.has_failed \
                and own.code not in ("exception", "terminated") and own.blames in ("self", "node", "job"):
            groups.setdefault(own.sameness, []).append(own)
    made = [make_candidate(clues) for clues in groups.values()]
    return [replace(one, strength=max(one.strength, CREDIBLE), sure=False, doubts=("only-symptom",)) for one in made]


def make_candidate(clues: Sequence[Clue]) -> Candidate:
    """From observations of one reason, of one or many ranks."""
    ordered = sorted(clues, key=lambda clue: (clue.at is None, clue.at.at_s if clue.at else 0.0, clue.rank or 0))
    first = ordered[0]
    return Candidate(
        code=first.code, strength=max(clue.strength for clue in clues),
        ranks=tuple(sorted({clue.rank for clue in clues if clue.rank is not None})),
        hosts=tuple(sorted({clue.host for clue in clues})), at=earliest(clue.at for clue in clues),
        proofs=tuple(proof for clue in ordered[:2] for proof in clue.proofs)[:PROOFS_LIMIT], values=first.values,
        retry=first.retry, blames=first.blames, sure=any(clue.sure for clue in clues),
        is_vague=all(clue.is_vague for clue in clues),
    )


def _of_host(evidence: Evidence, host: HostEvidence) -> List[Candidate]:
    ranks = tuple(rank.rank for rank in evidence.ranks_of(host.host))
    found = []
    if host.rebooted:
        found.append(Candidate("node-rebooted", STRENGTH["node-rebooted"], ranks, (host.host,), blames="node",
                               retry="same", proofs=_story(evidence, host.host, "reboot")))
    if host.supervisor_lost:
        found.append(Candidate("supervisor-lost", STRENGTH["supervisor-lost"], ranks, (host.host,), blames="node",
                               retry="same", proofs=_story(evidence, host.host, "supervisor")))
    return found


def _story(evidence: Evidence, host: str, word: str) -> Tuple[Proof, ...]:
    """The lines of the job's story that say it of the host."""
    return tuple(Proof(text=event.text, host=host, at_s=event.at_s) for event in evidence.story
                 if host in event.text and word in event.text)[:2]


def _of_devices(evidence: Evidence, stories: Sequence[RankStory], found: Sequence[Candidate]) -> List[Candidate]:
    """Devices that are not well afterwards, when nothing else is credible or it is the failed rank's own device."""
    by_rank = {story.rank.rank: story for story in stories}
    credible = {rank for one in found if one.is_credible and not one.is_vague for rank in one.ranks}
    alarms = []
    for host in evidence.hosts:
        for fact in host.devices:
            ranks = tuple(rank.rank for rank in evidence.ranks_of(host.host) if rank.device == fact.device)
            if credible and not credible & set(ranks):
                continue
            ended = [by_rank[rank] for rank in ranks if rank in by_rank]
            if not credible and ranks and not any(story.rank.has_failed or story.waited or story.rank.stopped
                                                  or story.is_silent for story in ended):
                continue
            proof = Proof(text=f"device {fact.device}: {fact.problem}", host=host.host, file=fact.file,
                          rank=ranks[0] if ranks else None)
            alarms.append(Candidate(fact.code, STRENGTH["device-alarm"], ranks, (host.host,), blames="node",
                                    at=earliest(story.end for story in ended), retry="exclude", sure=False,
                                    proofs=(proof,), values={"device": str(fact.device), "problem": fact.problem},
                                    doubts=("only-afterwards",)))
    return alarms
