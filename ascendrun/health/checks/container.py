"""Checks of the container of a job: its runtime, and the image on each node."""

from __future__ import annotations

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
    if found is None or found.problem is None:
        return
    evidence = (found.detail,) if found.detail else ()
    yield finding(found.problem, Severity.FAIL, host, evidence, runtime=found.runtime, image=found.image)


@check("container-image", "the image of the job is the same on all nodes", "image-differs")
def check_container_image(context: CheckContext) -> Iterator[Finding]:
    found = {host: facts.container for host, facts in context.facts.items() if facts.container and facts.container.id}
    for image in dict.fromkeys(one.image for one in found.values()):
        ids = {host: (one.id or "")[:12] for host, one in found.items()}
        yield from outliers("image-differs", Severity.FAIL, ids, image=image)
