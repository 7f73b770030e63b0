"""Reasons for the state of a job: one function for each reason. The key of the text is the reason's code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from ascendrun.core.dataclass import dataclass
from ascendrun.text import Text

Detail = Union[Text, str]
"""Report of a node or a tool; str: its output."""


def new() -> Text:
    return Text("reason.new", "waiting for the scheduler")


def rebuilt() -> Text:
    return Text("reason.rebuilt", "rebuilt after damage to the job list; waiting for the nodes")


def nodes_available(count: int) -> Text:
    return Text("reason.nodes-available", "{count:plural node nodes} available", count=count)


def queued_behind(job: str, name: str, hosts: Sequence[str]) -> Text:
    return Text(
        "reason.queued-behind",
        "waiting for {count:plural node nodes} (queued behind {job} {name})",
        job=job,
        name=name,
        hosts=list(hosts),
        count=len(hosts),
    )


def nodes_in_use(job: str, name: str, hosts: Sequence[str]) -> Text:
    return Text(
        "reason.nodes-in-use",
        "waiting for {hosts:hosts} (in use by {job} {name})",
        job=job,
        name=name,
        hosts=list(hosts),
    )


def nodes_held(hosts: Sequence[str], why: Text) -> Text:
    """Return the reason. `why`: of the first machine, as core/machines.Hold has it."""
    return Text("reason.nodes-held", "waiting for {hosts:hosts} ({why})", hosts=list(hosts), why=why)


def too_few_hosts(needed: int, usable: int, hosts: Sequence[str], why: Detail) -> Text:
    """Return the reason. `hosts`: of the pool, not usable; `why`: the first of them is not."""
    return Text(
        "reason.too-few-hosts",
        "{needed:plural host hosts} needed, {usable} usable; waiting for {hosts:hosts} ({why})",
        needed=needed,
        usable=usable,
        hosts=list(hosts),
        why=why,
    )


def host_unidentified() -> Text:
    return Text("reason.host-unidentified", "no response yet; it may be a machine that is held")


def host_away(error: Detail | None) -> Text:
    return Text("reason.host-away", "unreachable: {error}", error=error)


def host_passed_over(until_s: float) -> Text:
    return Text("reason.host-passed-over", "not ready for this job; used again after {until_s:clock}", until_s=until_s)


def host_excluded() -> Text:
    return Text("reason.host-excluded", "excluded by restart.exclude_node_findings")


def passed_over(hosts: Sequence[str], why: Detail) -> Text:
    return Text("reason.passed-over", "passed over {hosts:hosts}: {why}", hosts=list(hosts), why=why)


def held_by_user(user: str) -> Text:
    return Text("reason.held-by-user", "held by {user}", user=user)


def waiting_for_job(job: str, stage: str | None) -> Text:
    return Text("reason.waiting-for-job", "waiting for {needed}", needed=_needed(job, stage), job=job)


def dependency_unknown(job: str) -> Text:
    return Text("reason.dependency-unknown", "not started: required job {job} not found", job=job)


def dependency_failed(job: str, stage: str | None, state: str) -> Text:
    return Text(
        "reason.dependency-failed",
        "not started: {needed} ended {state}",
        needed=_needed(job, stage),
        job=job,
        state=state,
    )


def _needed(job: str, stage: str | None) -> Text:
    if stage is None:
        return Text("reason.needed-job", "{job}", job=job)
    return Text("reason.needed-stage", "stage {stage} ({job})", stage=stage, job=job)


def stage_files_lost(host: str, lost: str, stage: str | None, pipeline: str | None) -> Text:
    return Text(
        "reason.stage-files-lost",
        "{host} does not have the files that stage {stage} wrote to its working directory on {lost}, which was reported"
        " as lost: `ascendrun undrain {lost}` if it responds again, or repeat the stage with --resume {pipeline}"
        " --from-stage {stage}",
        host=host,
        lost=lost,
        stage=stage,
        pipeline=pipeline,
    )


def checked(count: int, seconds: float) -> Text:
    return Text(
        "reason.checked",
        "checked {count:plural node nodes} in {seconds:duration}",
        count=count,
        seconds=round(seconds, 3),
    )


def staged(count: int, seconds: float) -> Text:
    return Text(
        "reason.staged",
        "staged the code on {count:plural node nodes} in {seconds:duration}",
        count=count,
        seconds=round(seconds, 3),
    )


def running(ranks: int) -> Text:
    return Text("reason.running", "{ranks:plural rank ranks} running", ranks=ranks)


def succeeded(ranks: int) -> Text:
    return Text("reason.succeeded", "{ranks:plural rank ranks} exited with code 0", ranks=ranks)


def next_attempt(attempt: int) -> Text:
    return Text("reason.next-attempt", "attempt {attempt} waiting for its nodes", attempt=attempt)


def restarting(number: int | None, limit: int, at_s: float, why: Text) -> Text:
    """Return the reason. `number`: of the restart among those of the window, None: it is not counted."""
    if number is None:
        return Text("reason.restarting-uncounted", "restart at {at_s:clock}: {why}", at_s=at_s, why=why)
    return Text(
        "reason.restarting",
        "restart {number} of {limit} at {at_s:clock}: {why}",
        number=number,
        limit=limit,
        at_s=at_s,
        why=why,
    )


def waiting_for_end(hosts: Sequence[str], attempt: int) -> Text:
    return Text(
        "reason.waiting-for-end",
        "waiting for {hosts:hosts}: processes of attempt {attempt} may still run there",
        hosts=list(hosts),
        attempt=attempt,
    )


def not_restarted(why: Text, rule: Text) -> Text:
    """Return the reason of a failed job with a restart policy."""
    return Text("reason.not-restarted", "{why}; not restarted: {rule}", why=why, rule=rule)


def preflight_failed(hosts: Sequence[str], why: Detail) -> Text:
    """Return the reason. `hosts`: those that are not ready, () when it is the plan or `why` names them itself."""
    return Text(
        "reason.preflight-failed", "preflight failed (no process was started): {why}", why=why, hosts=list(hosts)
    )


def held(host: str, what: Detail) -> Text:
    return Text("reason.held", "waiting for {host}: {what}", host=host, what=what)


def no_common_ports(hosts: Sequence[str]) -> Text:
    return Text(
        "reason.no-common-ports", "waiting for a block of HCCL ports that is free on {hosts:hosts}", hosts=list(hosts)
    )


def on_host(host: str, why: Detail) -> Text:
    return Text("reason.on-host", "{host}: {why}", host=host, why=why)


def ranks_ended_early(host: str) -> Text:
    return Text("reason.ranks-ended-early", "the ranks on {host} ended before they finished", host=host)


def supervisor_lost(host: str) -> Text:
    return Text("reason.supervisor-lost", "{host}: the supervisor of the job's ranks was killed", host=host)


def hung_at_exit(cause: str, after_s: float | None) -> Text:
    """Return why a rank counts as hung at exit. A cause of another release is returned unchanged."""
    if cause == "finished" and after_s is not None:
        return Text("hung.finished", "its work ended more than {after_s:duration} ago; it is killed", after_s=after_s)
    if cause == "idle" and after_s is not None:
        return Text("hung.idle", "no activity for {after_s:duration} after another rank exited 0", after_s=after_s)
    if cause == "finished":
        return Text("hung.finished-unknown", "its work has ended; it is killed")
    if cause == "idle":
        return Text("hung.idle-unknown", "no activity after another rank exited 0")
    return Text("hung.other", "{cause}", cause=cause)


def start_timeout(hosts: Sequence[str], ranks: int, limit_s: float) -> Text:
    return Text(
        "reason.start-timeout",
        "start timed out: {ranks:plural rank ranks} on {hosts:hosts} did not start within {limit_s:g} s"
        " (timeouts.start_s)",
        hosts=list(hosts),
        ranks=ranks,
        limit_s=limit_s,
    )


def time_limit(host: str | None, why: Detail) -> Text:
    return Text("reason.time-limit", "time limit reached: {why}", host=host, why=why)


def preempted(host: str, why: Detail) -> Text:
    return Text("reason.preempted", "preempted: {host} stopped its ranks ({why})", host=host, why=why)


def separate_trainings(host: str, world_size: int) -> Text:
    return Text(
        "reason.separate-trainings",
        "the nodes train separately: the processes on {host} have a world size of {world_size}",
        host=host,
        world_size=world_size,
    )


def hung(hosts: Sequence[str], ranks: Sequence[int], finding: Text) -> Text:
    return Text("reason.hung", "hung: {finding}", finding=finding, hosts=list(hosts), ranks=list(ranks))


def hung_without_host(hosts: Sequence[str], ranks: Sequence[int], finding: Text) -> Text:
    """Return the reason of a hang whose cause is a host that does not respond."""
    return Text("reason.hung-without-host", "hung: {finding}", finding=finding, hosts=list(hosts), ranks=list(ranks))


def retried_by_user() -> Text:
    return Text("reason.retried-by-user", "restarted on user request")


def only_copy(step: int, hosts: Sequence[str]) -> Text:
    return Text(
        "reason.only-copy",
        "waiting for {hosts:hosts}: only copy of the checkpoint of step {step}",
        step=step,
        hosts=list(hosts),
    )


def stopped_by_user() -> Text:
    return Text("reason.stopped-by-user", "stopped on user request")


def controller_restarted() -> Text:
    return Text("reason.controller-restarted", "the controller was restarted before any process was started")


def internal_error(error: str, log: str) -> Text:
    return Text("reason.internal-error", "internal error: {error} (traceback: {log})", error=error, log=log)


def legacy(text: str) -> Text:
    """Return a reason of an earlier release that has no code."""
    return Text("reason.legacy", "{text}", text=text)


def stage_progress(number: int, count: int, stage: str, reason: Text) -> Text:
    return Text(
        "reason.stage-progress",
        "stage {number}/{count} {stage}: {reason}",
        number=number,
        count=count,
        stage=stage,
        reason=reason,
    )


LOST = {"rebooted": "node-rebooted", "directory-gone": "node-directory-gone", "by-user": "node-released"}
"""Kind of the failure for each reason why a node is lost."""


@dataclass(frozen=True)
class FirstFailure:
    """The failure that ended an attempt. `kind`: rank-exited, rank-killed, launcher-exited,
    launcher-killed, start-failed, one of LOST, or legacy.

    `rank` None: the whole host. `detail`: what the node reported.
    """

    kind: str
    host: str
    rank: int | None = None
    code: int | None = None
    signal: int | None = None
    detail: Detail | None = None

    def reason(self) -> Text:
        who = {"rank": self.rank, "host": self.host}
        if self.kind == "rank-exited":
            return Text("reason.rank-exited", "rank {rank} on {host} exited with code {code}", code=self.code, **who)
        if self.kind == "rank-killed":
            return Text(
                "reason.rank-killed", "rank {rank} on {host} was killed by signal {signal}", signal=self.signal, **who
            )
        if self.kind == "launcher-exited":
            return Text(
                "reason.launcher-exited",
                "the launcher of the ranks on {host} exited with code {code}",
                host=self.host,
                code=self.code,
            )
        if self.kind == "launcher-killed":
            return Text(
                "reason.launcher-killed",
                "the launcher of the ranks on {host} was killed by signal {signal}",
                host=self.host,
                signal=self.signal,
            )
        if self.kind == "node-rebooted":
            return Text("reason.node-rebooted", "{host} was rebooted; its ranks are lost", host=self.host)
        if self.kind == "node-directory-gone":
            return Text(
                "reason.node-directory-gone",
                "{host} has neither records nor processes of the job (container or home recreated); its ranks are lost",
                host=self.host,
            )
        if self.kind == "node-released":
            return Text("reason.node-released", "{host} was released by a user; its ranks are lost", host=self.host)
        if self.kind == "start-failed" and self.rank is not None:
            return Text(
                "reason.rank-start-failed", "rank {rank} on {host} failed to start: {why}", why=self.detail, **who
            )
        if self.kind == "start-failed":
            return Text(
                "reason.host-start-failed", "{host} failed to start its ranks: {why}", host=self.host, why=self.detail
            )
        return legacy(str(self.detail))
