"""Checks of the container of a job: its runtime, and the image on each node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascendrun.core.findings import Finding, Severity
from ascendrun.health.survey.check_context import CheckContext, check, finding, node_check, outliers
from ascendrun.health.survey.facts import NodeFacts


@node_check(
    "container",
    "the container runtime works and has the image of the job",
    "runtime-missing daemon-down runtime-refused image-missing image-pull-failed container-failed",
)
def check_container(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    found = facts.container
    if found is None or found.problem is None or lacks_glibc(found.detail):
        return
    evidence = (found.detail,) if found.detail else ()
    yield finding(found.problem, Severity.FAIL, host, evidence, runtime=found.runtime, image=found.image)


_GLIBC = re.compile(r"version `(GLIBC_[\d.]+)' not found \(required by ([^)]+)\)")
"""What the loader of glibc prints."""


def lacks_glibc(error: object) -> bool:
    """Return whether an error is a finding of check_glibc."""
    return _GLIBC.search(str(error)) is not None


@node_check(
    "glibc", "the C library, of the image if there is one, has what interpreter and torch need", "glibc-too-old"
)
def check_glibc(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    own = (facts.container and facts.container.detail, facts.python and facts.python.error)
    for error in (*own, facts.torch and facts.torch.error):
        found = _GLIBC.search(str(error))
        if found is not None:
            severity = Severity.FAIL if context.job is not None or error in own else Severity.NOTE
            yield finding("glibc-too-old", severity, host, version=found[1], file=found[2])
            return


@check("container-image", "the image of the job is the same on all nodes", "image-differs")
def check_container_image(context: CheckContext) -> Iterator[Finding]:
    found = {host: facts.container for host, facts in context.facts.items() if facts.container and facts.container.id}
    for image in dict.fromkeys(one.image for one in found.values()):
        ids = {host: (one.id or "")[:12] for host, one in found.items()}
        yield from outliers("image-differs", Severity.FAIL, ids, image=image)
