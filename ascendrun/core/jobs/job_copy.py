"""Copy of a submitted job, from which it can be rebuilt: job.json on the head and, with every attempt, on its nodes.

It has what the user submitted. It has no secrets: of `env_file` only the paths. `seal` and `unseal` protect the text of
a record, which changes, against damage.
"""

from __future__ import annotations

import binascii
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass, load_dataclass

if TYPE_CHECKING:
    from ascendrun.core.jobs.job import Job

COPY_LIMIT = 256 << 10
"""Bytes of a packed copy above which it is not sent to the nodes."""
COPY_SCHEMA = 1
OF_JOB = ("id", "name", "run", "pipeline", "stage", "needs", "home", "priority", "user")
"""Fields of a copy that are those of its job."""
_PACKED = "zlib"
_SEAL = '{"crc": "%08x", '
_SEAL_LENGTH = len(_SEAL % 0)


@dataclass(frozen=True)
class JobCopy:
    """`number`: its place in the list of jobs. `spec`, `hosts`, `trees`, `file`: JSON values, as in the store.
    `pipeline`, `stage`, `needs`, `home`, `priority`, `user`: as in the record of the job (core/jobs/job.py); `same_as`:
    of its request. `placement`: the hosts of the attempt that it was sent with, (): on the head, or all."""

    id: str
    number: int
    name: str
    run: str
    key: str
    spec: Mapping[str, Any]
    hosts: Sequence[Mapping[str, Any]]
    trees: Sequence[Mapping[str, Any]]
    file: str | None
    submitted_at_s: float
    pipeline: str | None = None
    stage: str | None = None
    needs: str | None = None
    home: str | None = None
    priority: int = 0
    same_as: str | None = None
    placement: Sequence[str] = ()
    user: str | None = None
    schema: int = COPY_SCHEMA

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def packed(self) -> dict[str, str]:
        """Return the copy as its nodes store it: the pool of a job is the same 130 bytes for each of its hosts."""
        text = json.dumps(self.to_json()).encode()
        return {_PACKED: binascii.b2a_base64(zlib.compress(text), newline=False).decode()}

    @classmethod
    def from_json(cls, values: Any) -> JobCopy:
        """Load a copy, packed or not. Raises ValueError if it is damaged or of a newer release."""
        try:
            copy = load_dataclass(cls, _unpacked(values))
            whole = copy.schema <= COPY_SCHEMA and all(
                isinstance(value, str) for value in (copy.id, copy.name, copy.run, copy.key)
            )
            assert whole and copy.run.endswith(f"-{copy.id}") and copy.number > 0
            job = copy.new_job()
            assert job.pool or job.engine
        except (TypeError, KeyError, AttributeError, AssertionError, ValueError, zlib.error) as error:
            raise ValueError(f"not a copy of a job: {error}") from error
        return copy

    def new_job(self) -> Job:
        """Return the record of the job as it was when it was submitted."""
        from ascendrun.core.hosts import queue_of
        from ascendrun.core.jobs.job import Job, Request  # here: `exec` needs no job
        from ascendrun.core.jobs.restart import policy_of
        from ascendrun.core.rank_env import forks_ranks

        return Job(
            **{name: getattr(self, name) for name in OF_JOB},
            hosts=(),
            pool=tuple(str(host["name"]) for host in self.hosts),
            request=Request(
                self.spec.get("nodes") or len(self.hosts),
                self.spec.get("spare_nodes") or 0,
                self.same_as,
                min_nodes=self.spec.get("min_nodes") or 0,
            ),
            grace_s=float(self.spec["checkpoint"]["grace_period_s"]),
            start_s=float(self.spec["timeouts"]["start_s"]),
            created_at_s=float(self.submitted_at_s),
            since_s=float(self.submitted_at_s),
            policy=policy_of(self.spec),
            forks=forks_ranks(self.spec),
            engine=queue_of(self.spec),
        )


def _unpacked(values: Mapping[str, Any]) -> Mapping[str, Any]:
    packed = values.get(_PACKED)
    found = values if packed is None else json.loads(zlib.decompress(binascii.a2b_base64(packed)))
    assert isinstance(found, dict)
    return found


def seal(values: Mapping[str, Any]) -> str:
    """Return the JSON text of a record that starts with its checksum; a change of the text must seal it again."""
    text = json.dumps(values, default=str)
    return _SEAL % zlib.crc32(text.encode()) + text[1:]


def unseal(text: str) -> dict[str, Any]:
    """Return the values of a record. Raises ValueError if it is damaged; a record without a checksum may be intact."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a record")
    has_seal = "crc" in values or "saved_ns" in values
    if has_seal and text[:_SEAL_LENGTH] != _SEAL % zlib.crc32(b"{" + text[_SEAL_LENGTH:].encode()):
        raise ValueError("the record does not match its checksum")
    return values
