"""What nodes say of live jobs' files, and where it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.spec import JobSpec
from ascendrun.head.boot import AgentImage
from ascendrun.head.guard import Guard
from ascendrun.head.links import Links
from ascendrun.head.livejobs import LiveJobs
from ascendrun.head.store import Store
from ascendrun.head.submission import Submission, make_job
from tests.unit.head.test_links import Deaf, Nowhere

CUT = {"event": "truncated", "file": "rank-0.out", "generation": 0, "size": 10, "sent": 100}
HELD = {"event": "follow_held", "file": "rank-0.out", "generation": 1, "message": "Too many open files"}


@pytest.mark.parametrize(("header", "words"), [
    (CUT, "n1: rank-0.out.0 was cut there to 10 bytes; what came before it was cut is kept here"),
    (HELD, "n1: rank-0.out.1 cannot be opened there (Too many open files); its bytes, and those of the files after it, "
           "come when it can"),
])
def test_the_trouble_of_a_node_with_a_file_stands_in_the_story_of_the_job_whose_it_is(
        tmp_path: Path, header: dict[str, Any], words: str) -> None:
    store = Store.open(tmp_path)
    links = Links(Nowhere(), AgentImage(b"", "", ""), Deaf())  # type: ignore[arg-type]  # nobody is to be reached
    nobody: Any = Deaf
    jobs = LiveJobs(tmp_path, store, links, post=lambda call: call(), guard=Guard(), gathering=nobody, samples=nobody)
    host = Host("n1")
    for key in ("mine", "other"):
        submission = Submission(key, JobSpec(name=key, command=("true",)), (host,), (), None)
        job = store.add_job(key=key, make_job=lambda i, h, s=submission: make_job(s, i, h, 1.0), spec={}, hosts=[],
                            trees=[], file=None, now_s=1.0)
        jobs.add(job, submission)
    mine, other = jobs
    jobs.hear(links.get(host), {**header, "tag": mine.job.tag}, b"")
    assert jobs.story(mine.job.id)[-1] == ("note", words)
    assert words not in str(jobs.story(other.job.id))
    links.close()
    store.close()
