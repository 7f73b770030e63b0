"""Examination of hosts: sends each its survey, has them test mutual connections, and passes on the raw results.

`Examination` is one round over hosts that have reported; `SurveyOperation` connects and plans first, for a command.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.ascend.containers import with_npus
from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.command_rules import makes_files, script_of
from ascendrun.core.jobfile.launchers import LAUNCHERS, RAY
from ascendrun.core.jobs.plan import container_request
from ascendrun.core.jobs.reasons import Reason, because
from ascendrun.core.jobs.roles import place_parts
from ascendrun.core.network import HCCL_PORTS, candidate_bases, candidate_ports
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, report_values
from ascendrun.head.agents.connections import Links, ask, post_later
from ascendrun.head.agents.node_query import NodeQuery
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.protocol.control_socket import Answer
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.survey.submission import Submission, read_secret_env
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan, NodePlan
    from ascendrun.head.survey.kept_facts import KeptFacts
    from ascendrun.health.survey.pair_tests import ConnectionTestPlan
    from ascendrun.health.survey.probes import SurveyRequest

STARTED_S = 20.0
"""Seconds after which a host without a running agent fails; the others do not wait longer for it."""
LIGHT_S, FULL_S = 8.0, 70.0
CONTAINER_S, PULL_S = 60.0, 1800.0
"""Limits of a survey in an image, and of one that may have to fetch it: tens of GB."""
PULL_LOOK_S, PULL_LOOKS_S = 2.0, 10.0
"""When hosts that fetch an image are first queried how far they are, and the longest pause between two such queries."""
CONNECT_LIGHT_S, CONNECT_FULL_S = 6.0, 10.0
SPARE_S = 6.0
"""Seconds beyond the node's own deadline that the head node waits for its reply."""
HCCL_DEVICE_PORT = 16666
TRIED_PORTS = 8
"""Candidates for MASTER_PORT that are tried: enough to find out whether one will be free."""
SCRUBBED_LENGTH = 4
"""Shorter values are not masked: that would mask half of every text, and protects nothing."""
PATHS_WRITTEN = ("output",)
"""Path options of programs that name output, not required input."""


class Examination:
    """One round over the hosts of `request` that have reported, and are connected; each gets a reply within the
    deadline, in `done`, which is called once. Its paths must exist; those of the job's program are added, unless they
    are among the files of a training, which its plan judges. `pulling` gets what hosts fetch while the others wait.

    Use from the controller's thread; `done` is called there.
    """

    def __init__(
        self,
        request: Survey,
        spec: JobSpec | None,
        reports: Mapping[str, NodeReport],
        plan: LaunchPlan | None,
        *,
        links: Links,
        done: Callable[[Mapping[str, SurveyReply]], None],
        pulling: Callable[[Reason], None] = lambda reason: None,
        kept: KeptFacts | None = None,
    ) -> None:
        self._hosts = tuple(host for host in request.hosts if host.name in reports)
        self._spec, self._reports, self._plan = spec, reports, plan
        parts = place_parts(spec, request.hosts) if spec is not None else ()
        self._specs = {host.name: part.spec for part, own in parts for host in own}
        self._request = replace(request, paths=_paths(request, spec))
        self._requests = {
            host.name: replace(request, paths=_paths(request, part.spec)) for part, own in parts for host in own
        }
        self._links, self._done, self._pulling, self._kept = links, done, pulling, kept
        self._known: dict[str, Mapping[str, Any]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._refused: dict[str, Failure] = {}
        self._waiting: set[str] = set()
        self._secrets: Mapping[str, str] = {}
        self._is_pulling = False

    def start(self) -> None:
        from ascendrun.health.survey.probes import survey_items

        spec = self._spec
        timeout_s = max(FULL_S if self._request.is_full else LIGHT_S, spec.timeouts.check_s if spec else 0.0)
        pulls = {one.container.pull != "never" for one in self._specs.values() if one.container is not None}
        if pulls:
            timeout_s = max(timeout_s, PULL_S if True in pulls else CONTAINER_S)
        self._waiting = {host.name for host in self._hosts}
        self._secrets = read_secrets(spec)
        for host in self._hosts:
            spec = self._specs.get(host.name, self._spec)
            request = self._requests.get(host.name, self._request)
            wanted = make_survey_request(host, self._reports[host.name], request, spec, self._plan)
            # the job's shell: set-up, variables and directory, as for its first rank there
            node = node_of(host.name, self._plan)
            shell = {
                "setup": spec.setup if spec is not None else None,
                "env": dict(spec.env) if spec is not None and self._plan is None else rank_env(host.name, self._plan),
                "cwd": node.cwd if node is not None else "",
                "secret_env": self._secrets,
            }
            if spec is not None and spec.container is not None:
                shell["container"] = with_npus(container_request(spec, (node and node.devices) or ()))
            self._survey(host, agent.Survey(survey_items(wanted), timeout_s, shell))
        if not self._hosts:
            self._finish()
        if True in pulls:
            post_later(self._links, PULL_LOOK_S, partial(self._look_at_pulls, PULL_LOOK_S))

    @property
    def is_new(self) -> bool:
        """Return whether every probe was asked now."""
        return not any(self._known.values())

    def _survey(self, host: Host, survey: agent.Survey) -> None:
        report = self._reports[host.name]
        known = self._known[host.name] = self._kept.known(report, survey) if self._kept is not None else {}
        asked = replace(survey, items=[item for item in survey.items if item["name"] not in known])
        self._query(host, asked, partial(self._take_survey, asked))

    def _look_at_pulls(self, pause_s: float) -> None:
        """Query the hosts that have not replied, and again after a pause, until all have."""
        boxes = ((host, self._specs[host.name].container) for host in self._hosts if host.name in self._specs)
        images = {host: box.image for host, box in boxes if box is not None and not self._has_replied(host.name)}
        awaited, found = set(images), dict[Host, tuple[int, int]]()

        def take(host: Host, reply: Reply[agent.SurveyReply]) -> None:
            awaited.discard(host)
            layers = _layers(reply.message.results, images[host]) if reply.error is None else None
            if layers is not None and not self._has_replied(host.name):
                found[host] = layers
            if awaited:
                return
            if self._is_pulling and not found:  # what is shown must not stay when the image is there
                self._pulling(because("nodes-available", count=len(self._hosts)))
            self._is_pulling = bool(found)
            for image in sorted({images[host] for host in found}):
                fetching = {host.name: found[host] for host in images if host in found and images[host] == image}
                present, known = map(sum, zip(*fetching.values()))
                code = "image-layers" if known else "image-pulling"
                self._pulling(because(code, fetching, image=image, present=present, known=known))
            after_s = min(2 * pause_s, PULL_LOOKS_S)
            post_later(self._links, after_s, partial(self._look_at_pulls, after_s))

        request = agent.Survey([{"name": "pulls", "kind": "pulls"}], LIGHT_S)
        for host in images:
            ask(self._links, host, request, deadline_s=LIGHT_S, then=partial(take, host))

    def _has_replied(self, host: str) -> bool:
        return host in self._results or host in self._refused

    def _take_survey(self, asked: agent.Survey, host: str, reply: Reply[agent.SurveyReply]) -> None:
        if reply.error is None:
            results = scrub(reply.message.results, self._secrets)
            if self._kept is not None:
                self._kept.note(self._reports[host], asked, results)
            self._results[host] = {**self._known[host], **results}
        else:
            self._refused[host] = reply.error
        if not self._waiting:
            self._test_connections()

    def _test_connections(self) -> None:
        plan, pings = self._connection_test_plan(), self._ping_items()
        hosts = [
            host for host in self._hosts if host.name in self._results and (plan is not None or host.name in pings)
        ]
        if not hosts:
            self._finish()
            return
        nonce, bases = secrets.token_hex(8), hccl_candidates(self._request.device_type, self._plan)
        run = self._plan.run_id if self._plan is not None else "doctor"
        connect_s = CONNECT_FULL_S if self._request.is_full else CONNECT_LIGHT_S
        self._waiting = {host.name for host in hosts}
        for host in hosts:
            items = []
            if plan is not None:
                items = connection_test_items(host.name, plan, nonce, connect_s, run=run, bases=bases)
            items += [pings[host.name]] if host.name in pings else []
            timeout_s = max([connect_s, *(float(item["timeout_s"]) for item in items)])
            self._query(host, agent.Survey(items, timeout_s), self._take_tests)

    def _connection_test_plan(self) -> ConnectionTestPlan | None:
        from ascendrun.health.survey.pair_tests import choose_ports, plan_connection_tests
        from ascendrun.health.survey.probes import read_results

        if self._request.names is not None:
            return None
        taken = [read_results({"ports": results.get("ports")}).get("ports") or () for results in self._results.values()]
        bases = hccl_candidates(self._request.device_type, self._plan)
        ports = choose_ports(master_candidates(self._plan), bases, taken)
        return plan_connection_tests(
            {host: report for host, report in self._reports.items() if host in self._results}, ports
        )

    def _ping_items(self) -> Mapping[str, dict[str, Any]]:
        """Return the ping targets of each host's NPU ports; pings take long, so they are never in the light round."""
        from ascendrun.health.survey.pair_tests import ping_items

        if (
            not self._request.is_full
            or self._request.names is not None
            or len(self._results) < 2
            or self._request.device_type not in (None, "npu")
        ):
            return {}
        return ping_items(self._results, every_pair=self._request.every_pair)

    def _take_tests(self, host: str, reply: Reply[agent.SurveyReply]) -> None:
        if reply.error is None:
            self._results[host].update(reply.message.results)
        if not self._waiting:
            self._finish()

    def _finish(self) -> None:
        replies = {host: SurveyReply(host, results=results) for host, results in self._results.items()}
        self._done({**replies, **{host: SurveyReply(host, error) for host, error in self._refused.items()}})

    def _query(self, host: Host, request: agent.Survey, then: Callable[[str, Reply[agent.SurveyReply]], None]) -> None:
        def on_reply(reply: Reply[agent.SurveyReply]) -> None:
            if host.name in self._waiting:
                self._waiting.discard(host.name)
                then(host.name, reply)

        ask(self._links, host, request, deadline_s=request.timeout_s + SPARE_S, then=on_reply)


def _layers(results: Mapping[str, Any], image: str) -> tuple[int, int] | None:
    """Return how many layers of an image a node has, and knows; None: it fetches no such image."""
    raw = results.get("pulls")
    found = raw.get("pulls") if isinstance(raw, dict) else None
    pair = found.get(image) if isinstance(found, dict) else None
    if not isinstance(pair, list) or [type(one) for one in pair] != [int, int] or not 0 <= pair[0] <= pair[1]:
        return None
    return pair[0], pair[1]


class SurveyOperation:
    """Survey for a command: connect, probe, plan the given job, examine, and one reply for each host. Use from the
    controller's thread."""

    def __init__(self, request: Survey, links: Links, answer: Answer, *, ended: Callable[[], None]) -> None:
        self._hosts = request.hosts
        self._submission = None if request.submission is None else Submission.from_json(request.submission)
        self._spec = self._submission.spec if self._submission else None
        self._request = replace(request, device_type=self._spec.devices.type) if self._spec else request
        self._links, self._answer, self._ended = links, answer, ended
        self._reports: dict[str, NodeReport] = {}
        self._refused: dict[str, SurveyReply] = {}
        self.is_done = False
        self.query = NodeQuery(self._hosts, links, reported=self._take_report, refused=self._take_failure)
        self.on_up, self.on_down = self.query.on_up, self.query.on_down

    def start(self) -> None:
        post_later(self._links, STARTED_S, self._give_up)
        self.query.start()

    def _give_up(self) -> None:
        if not self.query.is_done:
            what = Text("agent.not-started", "the agent did not start within {limit_s:g} s", limit_s=STARTED_S)
            self.query.give_up_connecting(Failure("unreachable", what))

    def _take_report(self, report: NodeReport) -> None:
        self._reports[report.host] = report
        self._go_on()

    def _take_failure(self, host: str, failure: Failure) -> None:
        error = next(self._links.get(one).last_error for one in self._hosts if one.name == host)
        self._refused[host] = SurveyReply(host, Failure.of(error) if error else failure)
        self._go_on()

    def _go_on(self) -> None:
        if len(self._reports) + len(self._refused) < len(self._hosts):
            return
        ordered = {host.name: self._reports[host.name] for host in self._hosts if host.name in self._reports}
        from ascendrun.head.survey.survey_reader import dry_plan

        plan = None if self._refused else dry_plan(self._submission, self._reports, time.time())
        Examination(self._request, self._spec, ordered, plan, links=self._links, done=self._reply).start()

    def _reply(self, replies: Mapping[str, SurveyReply]) -> None:
        self.is_done = True
        self._ended()
        everyone = [host.name for host in self._hosts]
        for index, host in enumerate(everyone):
            reply = self._refused.get(host) or replies[host]
            if reply.refused is None:
                reply = replace(reply, report=report_values(self._reports[host], everyone))
            self._answer(reply, b"", index == len(everyone) - 1)


def make_survey_request(
    host: Host, report: NodeReport, request: Survey, spec: JobSpec | None, plan: LaunchPlan | None
) -> SurveyRequest:
    """Make the request to one host. MASTER_PORT will be opened on the first one; without a plan this may be any."""
    from ascendrun.health.survey.probes import SurveyRequest

    ports = master_candidates(plan)[:TRIED_PORTS] if plan is None or plan.nodes[0].host == host.name else ()
    bases = hccl_candidates(request.device_type, plan)
    hccl_ports = (port for base in bases for port in range(base, base + HCCL_PORTS))
    return SurveyRequest(
        host=host.name,
        device_type=request.device_type,
        root=report.root,
        python=choose_python(spec, host, report),
        shell_s=spec.timeouts.check_s if spec is not None else LIGHT_S,
        ports=(*ports, *hccl_ports, *((HCCL_DEVICE_PORT,) if request.device_type == "npu" else ())),
        folders=(spec.checkpoint.dir,) if spec is not None and spec.checkpoint.dir else (),
        paths=request.paths,
        training=request.training,
        env=rank_env(host.name, plan),
        is_full=request.is_full,
        names=request.names,
        engine=host.engine_type,
    )


def read_secrets(spec: JobSpec | None) -> Mapping[str, str]:
    """Return the variables of env_file: a setup may use them. {} if a file cannot be read: the start reports that."""
    if spec is None or not spec.env_file:
        return {}
    try:
        return read_secret_env(spec)
    except AscendrunError:
        return {}


def scrub(value: Any, secret_env: Mapping[str, str]) -> Any:
    """Mask the secrets in raw results: a set-up may have printed their values, and `env` always does."""
    if not secret_env:
        return value
    if isinstance(value, str):
        for secret in secret_env.values():
            if len(secret) >= SCRUBBED_LENGTH:
                value = value.replace(secret, "(secret)")
        return value
    if isinstance(value, dict):
        return {name: scrub(one, secret_env) for name, one in value.items()}
    return [scrub(one, secret_env) for one in value] if isinstance(value, list) else value


def node_of(host: str, plan: LaunchPlan | None) -> NodePlan | None:
    return next((node for node in plan.nodes if node.host == host), None) if plan is not None else None


def rank_env(host: str, plan: LaunchPlan | None) -> dict[str, str]:
    """Return the planned variables of the host's first rank; {} without a plan."""
    node = node_of(host, plan)
    return dict(node.ranks[0].env) if node is not None and node.ranks else {}


def master_candidates(plan: LaunchPlan | None) -> tuple[int, ...]:
    return plan.master_ports if plan is not None else candidate_ports("doctor", None)


def hccl_candidates(device_type: str | None, plan: LaunchPlan | None) -> tuple[int, ...]:
    """Return the candidates for HCCL's base port; () without NPUs, or if the job moves them in another way."""
    if device_type != "npu":
        return ()
    return plan.hccl_bases if plan is not None else candidate_bases("doctor", {})


def choose_python(spec: JobSpec | None, host: Host, report: NodeReport) -> str | None:
    """Return the command of the job's interpreter; None: its command does not appear to be a Python program."""
    if spec is None:
        return report.python if host.is_local else "python3"
    if spec.python is not None:
        return spec.python
    if spec.program is not None or spec.launcher in (*LAUNCHERS, RAY):
        return report.python if host.is_local and spec.container is None else "python3"
    first = (spec.command or ("",))[0]
    return first if first.rpartition("/")[2].startswith("python") else None


def _paths(request: Survey, spec: JobSpec | None) -> tuple[str, ...]:
    paths = dict.fromkeys((*request.paths, *(input_paths(spec) if spec is not None else ())))
    return tuple(path for path in paths if path not in request.training)


def input_paths(spec: JobSpec) -> tuple[str, ...]:
    """Return the paths that must exist on a node: the user's script if the command has its absolute path, or those that
    a bundled program reads. A container's image may have the script."""
    if spec.program is None:
        is_made = spec.container is not None or makes_files(spec.setup)
        script = None if is_made else script_of(spec.command or (), spec.launcher)
        return (script,) if script is not None and script.startswith("/") else ()
    from ascendrun.core.jobfile.spec import parse_program_options
    from ascendrun.planner.training import load_programs

    program = load_programs(parse_program_options).get(spec.program)
    if program is None:
        return ()
    return tuple(
        str(spec.args[name])
        for name, option in program.options.items()
        if option.type == "path"
        and name not in PATHS_WRITTEN
        and spec.args.get(name)
        and str(spec.args[name]).startswith("/")
    )


def connection_test_items(
    host: str, plan: ConnectionTestPlan, nonce: str, timeout_s: float, *, run: str, bases: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one host's items of a round of connection tests. `bases`: one of the ports is a base of HCCL's ports,
    which are leased for `run` during the test."""
    common = {"as": host, "nonce": nonce, "timeout_s": timeout_s}
    items: list[dict[str, Any]] = []
    if plan.expected.get(host):
        items.append(
            {
                **common,
                "kind": "listen",
                "name": "listen",
                "ports": list(plan.ports),
                "block": next((port for port in plan.ports if port in bases), None),
                "tag": run,
                "expect": list(plan.expected[host]),
            }
        )
    if plan.targets.get(host):
        targets = [vars(target) for target in plan.targets[host]]
        items.append({**common, "kind": "tcp", "name": "connection-tests", "targets": targets})
    return items
