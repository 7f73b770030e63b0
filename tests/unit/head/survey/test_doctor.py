"""An examination over agents that answer what they like: every host has an answer, and `done` is called once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import Container, JobSpec
from ascendrun.core.jobs.reasons import Reason
from ascendrun.core.node_messages import Failure
from ascendrun.core.reports import NodeReport, Route
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Survey, SurveyReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.survey.doctor import Examination, input_paths, scrub
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.probes import read_facts

NAMES = ("n1", "n2", "n3")
DEAD: Reply[Any] = Reply(None, error=Failure("connection-lost", "silent for 15 s"))


class Agents:
    """Stands for the links: `answers` says what the agent of each host replies to its surveys, in order."""

    def __init__(self, answers: Mapping[str, list[Reply[Any]]]) -> None:
        self.answers = {name: list(replies) for name, replies in answers.items()}
        self.asked: dict[str, list[agent.Survey]] = {name: [] for name in answers}
        self.posted: list[Callable[[], None]] = []
        self.post = self.posted.append

    def get(self, host: Host) -> Agent:
        return Agent(self, host.name)


class Agent:
    def __init__(self, agents: Agents, name: str) -> None:
        self._agents, self._name = agents, name

    def call(self, request: agent.Survey, *, deadline_s: float, done: Callable[[Reply[Any]], None]) -> None:
        assert deadline_s < 120
        self._agents.asked[self._name].append(request)
        replies = self._agents.answers[self._name]
        done(replies.pop(0) if replies else DEAD)


def report(name: str) -> NodeReport:
    routes = {peer: Route("eth0", f"10.0.0.{name[1]}") for peer in NAMES if peer != name}
    return NodeReport(name, "/r", name, f"b-{name}", None, "u", "/py", "3.9", "5", "x", 1, None, None, 0.0, routes)


TESTS = "connection-tests"
HOSTS = tuple(map(Host, NAMES))
LIGHT = Survey(HOSTS, is_full=False)


def examine(
    answers: Mapping[str, list[Reply[Any]]], request: Survey = LIGHT, spec: JobSpec | None = None
) -> tuple[Mapping[str, SurveyReply], Agents]:
    agents, ended = Agents(answers), []
    reports = {name: report(name) for name in NAMES}
    Examination(request, spec, reports, None, links=agents, done=ended.append).start()
    while agents.posted:
        agents.posted.pop(0)()
    assert len(ended) == 1 and set(ended[0]) == set(NAMES)
    return ended[0], agents


def fine(**results: Any) -> Reply[Any]:
    return Reply(agent.SurveyReply(results))


def test_hosts_that_died_meanwhile_are_answers_and_the_others_go_on_to_reach_each_other() -> None:
    answers, agents = examine({"n1": [fine(), fine(**{TESTS: {"tests": []}})], "n2": [DEAD], "n3": [fine(), DEAD]})
    assert answers["n2"] == SurveyReply("n2", DEAD.error)
    assert answers["n1"].results[TESTS] == {"tests": []} and TESTS not in answers["n3"].results
    second = agents.asked["n1"][1].items
    assert {target["peer"] for item in second if item["kind"] == "tcp" for target in item["targets"]} == {"n3"}
    assert [item["expect"] for item in second if item["kind"] == "listen"] == [["n3"]]


def test_each_host_is_asked_for_the_interpreter_the_variables_and_the_container_of_its_role() -> None:
    box = {"image": "engine", "pull": "never"}
    roles = (
        {"name": "serve", "nodes": 2, "command": ("python3.9", "s.py"), "env": {"A": "1"}},
        {"name": "work", "command": ("/opt/python3", "w.py"), "container": box, "env": {"A": "2"}},
    )
    spec = JobSpec.model_validate({"name": "j", "roles": roles, "nodes": 3})
    _, agents = examine({name: [fine(), fine()] for name in NAMES}, spec=spec)
    asked = [agents.asked[name][0] for name in NAMES]
    assert [(one.shell or {})["env"]["A"] for one in asked] == ["1", "1", "2"]
    assert [(one.shell or {}).get("container", {}).get("image") for one in asked] == [None, None, "engine"]
    assert [name in json.dumps(one.items) for one in asked for name in ("python3.9", "/opt/python3")] == [
        *(True, False, True, False, False, True)
    ]


def test_when_nobody_answers_it_ends_all_the_same() -> None:
    answers, _ = examine({name: [DEAD] for name in NAMES})
    assert all(answer.refused for answer in answers.values())


def test_a_port_that_one_node_has_taken_is_not_used_to_reach_it() -> None:
    free, agents = examine({name: [fine(), fine()] for name in NAMES})
    first = next(item["ports"][0] for item in agents.asked["n1"][1].items if item["kind"] == "listen")
    taken = fine(ports={"taken": {str(first): {"uid": 0}}})
    _, agents = examine({"n1": [fine(), fine()], "n2": [taken, fine()], "n3": [fine(), fine()]})
    used = {port for item in agents.asked["n1"][1].items if item["kind"] == "listen" for port in item["ports"]}
    assert used and first not in used


NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70000) | st.text(max_size=8),
    lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ports", "taken", TESTS, "tests", "hccn", "out", "code", "texts", "1"]), some, max_size=4
        )
    ),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(NONSENSE, min_size=6, max_size=6), st.booleans())
def test_no_answer_can_keep_it_from_ending_or_make_the_judgement_fall_over(said: list[Any], is_full: bool) -> None:
    replies = [
        Reply(agent.SurveyReply({"ports": one, "hccn": one, TESTS: one, "x": index})) for index, one in enumerate(said)
    ]
    answers, _ = examine(
        {name: replies[2 * place : 2 * place + 2] for place, name in enumerate(NAMES)},
        Survey(HOSTS, is_full=is_full, device_type="npu"),
    )
    facts = {
        name: read_facts(report(name), answer.results) for name, answer in answers.items() if answer.refused is None
    }
    run_checks(CheckContext(facts=facts, device_type="npu"))


@pytest.mark.parametrize("text, left", [("token=abcd1234 end", "token=(secret) end"), ("nothing", "nothing")])
def test_values_of_secrets_are_scrubbed_out_of_whatever_a_node_says(text: str, left: str) -> None:
    raw = {"a": {"out": text, "lines": [text, 5, None]}}
    assert scrub(raw, {"T": "abcd1234", "EMPTY": "", "SHORT": "no"}) == {"a": {"out": left, "lines": [left, 5, None]}}


@pytest.mark.parametrize(
    ("more", "paths"),
    [
        ({"command": ("python", "-u", "/code/train.py", "/data")}, ("/code/train.py",)),
        ({"command": ("bash", "-c", "exec /code/run.sh")}, ("/code/run.sh",)),
        ({"command": ("/code/train.py",), "launcher": "torchrun"}, ("/code/train.py",)),
        ({"command": ("python", "train.py")}, ()),
        ({"command": ("python", "/code/train.py"), "setup": "git clone https://example.com/code /code"}, ()),
        ({"command": ("python", "/code/train.py"), "setup": "source /opt/env.sh"}, ("/code/train.py",)),
        ({"command": ("python", "/code/train.py"), "container": Container(image="x")}, ()),
    ],
)
def test_a_script_with_an_absolute_path_must_be_on_the_nodes(more, paths):
    assert input_paths(JobSpec(name="x", **more)) == paths


class Fetching(Agents):
    """Each host withholds the reply of its survey, and tells what it fetches as `rounds` has it."""

    def __init__(self, *rounds: Any) -> None:
        self.rounds, self.posted = {name: list(rounds) for name in NAMES}, []
        self.post = self.posted.append

    def get(self, host: Host) -> Any:
        return FetchingAgent(self, host.name)


class FetchingAgent:
    def __init__(self, agents: Fetching, name: str) -> None:
        self._rounds = agents.rounds[name]

    def call(self, request: agent.Survey, *, deadline_s: float, done: Callable[[Reply[Any]], None]) -> None:
        if [item["kind"] for item in request.items] == ["pulls"] and self._rounds:
            done(fine(pulls=self._rounds.pop(0)))


def test_layers_are_shown_while_hosts_fetch_an_image_and_no_longer() -> None:
    shown: list[Reason] = []
    fetches = ({"pulls": {"engine": [1, 2]}}, {"pulls": {"engine": [7, "x"], "other": [1, 2]}}, {"pulls": {}})
    agents = Fetching(*fetches)
    spec = JobSpec.model_validate({"name": "j", "command": ("x",), "container": {"image": "engine"}, "nodes": 3})
    reports = {name: report(name) for name in NAMES}
    one = Examination(LIGHT, spec, reports, None, links=agents, done=lambda _: None, pulling=shown.append)
    one.start()
    for _ in fetches:
        one._look_at_pulls(0.0)
        while agents.posted:
            agents.posted.pop(0)()
    assert [reason.code for reason in shown] == ["image-layers", "nodes-available"]
    assert (shown[0].hosts, shown[0].values) == (NAMES, {"image": "engine", "present": 3, "known": 6})
