"""Roles at run time: hosts, ranks and environments of each, names of ranks, and the end of the job."""

import json
from dataclasses import replace

import pytest

from ascendrun.core.errors import NotFoundError, PreflightError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job import Cause, NodeProgress, State
from ascendrun.core.jobs.placement import placement_faults, pool_of
from ascendrun.core.jobs.plan_text import render_plan
from ascendrun.core.jobs.roles import rank_labels, ranks_of_roles
from ascendrun.head.survey.submission import claims_of
from ascendrun.text.format import label_ranks
from tests.lib.job_stories import Story, ended, make_job, to_running
from tests.lib.launch_plans import job, plan, ranks_of

HOSTS = "a slots=8\nb slots=8\nc slots=8\n"
ROLES = (
    {"name": "serve", "nodes": 2, "command": ("./serve",), "env": {"X": "1"}, "ends_job": False},
    {"name": "work", "command": ("./work",), "devices": {"type": "cpu", "per_node": 1}},
)


def serving(**fields):
    devices = {"type": "npu", "per_node": 2}
    return job(command=None, nodes=3, devices=devices, roles=ROLES, **fields)


def test_each_role_has_its_own_world_and_knows_the_addresses_of_all() -> None:
    planned = plan(serving(), HOSTS)
    assert [(node.host, node.role, node.ends_job, node.node_rank) for node in planned.nodes] == [
        ("a", "serve", False, 0),
        ("b", "serve", False, 1),
        ("c", "work", True, 2),
    ]
    ranks = ranks_of(planned)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3, 4] and planned.world_size == 5
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "ASCENDRUN_ROLE", "X")
    assert [rank.env.get(name) for name in names for rank in (ranks[3],)] == [
        "3",
        "4",
        "1",
        "1",
        "10.0.0.1",
        "serve",
        "1",
    ]
    assert [ranks[4].env.get(name) for name in names] == ["0", "1", "0", "0", "10.0.0.3", "work", None]
    addresses = {"serve": ["10.0.0.1", "10.0.0.2"], "work": ["10.0.0.3"]}
    assert all(json.loads(rank.env["ASCENDRUN_ROLES"]) == addresses for rank in ranks)
    assert ranks[4].env["ASCENDRUN_METRICS_FILE"].endswith("rank-4.metrics.0")  # names of files are those of the job
    assert (ranks[0].argv, ranks[4].argv) == (("./serve",), ("./work",))


def test_only_nodes_of_a_role_with_devices_lease_them_and_each_role_has_a_port_of_its_first_node() -> None:
    nodes = render_plan(plan(serving(), HOSTS))["nodes"]
    assert [node["prepare"].get("devices", {}).get("ids") for node in nodes] == [[0, 1], [0, 1], None]
    assert [bool(node["prepare"]["ports"]) for node in nodes] == [True, False, True]
    assert [node["role"] for node in nodes] == ["serve", "serve", "work"]


def test_a_process_of_a_role_with_several_devices_counts_as_one_rank() -> None:
    planned = plan(serving(launcher="none"), HOSTS)
    assert len(ranks_of(planned)) == 3 and "ASCENDRUN_FORKS" not in ranks_of(planned)[0].env
    assert ranks_of(planned)[0].env["NPROC_PER_NODE"] == "2"


def test_a_host_may_get_any_role_unless_the_order_of_the_file_decides() -> None:
    hosts = parse_hostfile(HOSTS + "d slots=8\ne slots=1\n", "h")
    assert [host.name for host in pool_of(serving(), hosts)] == ["a", "b", "c", "d"]
    assert [host.name for host in pool_of(serving(), [*hosts[:2], hosts[4], hosts[3]])] == ["a", "b", "e"]
    assert {claim.count for claim in claims_of(serving(), hosts).values()} == {2}
    [(key, message, _)] = placement_faults(serving(), [hosts[0], hosts[4], hosts[1]])
    assert key == ("devices", "per_node") and message.values["hosts"] == ["e"]


def test_a_role_takes_hosts_of_its_groups_and_has_its_own_container() -> None:
    hosts = "a slots=8 groups=x\nb slots=8 groups=y\nc slots=8 groups=x,z\nd slots=8 groups=y\n"
    box = {"image": "own"}
    serve, work = {**ROLES[0], "groups": ("y",)}, {**ROLES[1], "groups": ("z", "x"), "container": box}
    spec = job(command=None, nodes=3, roles=(serve, work), container={"image": "common"}, devices={"per_node": 1})
    planned = plan(spec, hosts)
    assert [(node.host, node.role) for node in planned.nodes] == [("b", "serve"), ("d", "serve"), ("a", "work")]
    assert [node.container["image"] for node in planned.nodes if node.container] == ["common", "common", "own"]
    parsed = parse_hostfile(hosts, "h")
    assert [host.name for host in pool_of(spec, parsed)] == ["b", "d", "a"] == [node.host for node in planned.nodes]
    [(key, message, _)] = placement_faults(spec, parsed[:3])
    assert (key, message.values["listed"]) == (("roles", 0, "groups"), 1)
    with pytest.raises(PreflightError):
        plan(spec, "a groups=y\nb groups=x\nc groups=x\n")


def test_ranks_of_roles_have_names() -> None:
    nodes = [NodeProgress("a", 0, ranks=(0, 1), role="serve"), NodeProgress("b", 1, ranks=(2, 3), role="serve")]
    labels = rank_labels([*nodes, NodeProgress("c", 2, ranks=(4,), role="work")])
    assert labels == {0: "serve/0", 1: "serve/1", 2: "serve/2", 3: "serve/3", 4: "work/0"}
    assert not rank_labels([NodeProgress("a", 0, ranks=(0,))])
    assert label_ranks([4, 1, 0, 2], labels) == "serve/0-2,work/0" and label_ranks([1, 2], {}) == "1-2"
    assert ranks_of_roles(labels, ["work", "serve/1"]) == {1, 4}
    with pytest.raises(NotFoundError, match="no role 'wrok'"):
        ranks_of_roles(labels, ["wrok"])


def two_roles() -> Story:
    """A job whose two roles both end it."""
    roles = {"node1": "left", "node2": "right"}
    events = [
        inputs.Planned(one.ranks, 4, (), roles) if isinstance(one, inputs.Planned) else one for one in to_running()
    ]
    return Story(make_job()).tell(*events)


def test_the_first_role_that_ends_ends_the_job() -> None:
    story = two_roles().tell(ended(2), ended(0), ended(1))
    assert story.job.state is State.RUNNING
    story.tell(endings.NodeEnded("node1"))
    assert (story.job.state, story.job.reason.code) == (State.STOPPING, "completed")
    story.tell(ended(3, 1, stopped=True), endings.NodeEnded("node2"))
    assert story.job.state is State.SUCCEEDED


def test_a_job_without_a_role_that_ends_it_succeeds_when_all_have_ended() -> None:
    events = [
        replace(one, serving=("node1", "node2")) if isinstance(one, inputs.Planned) else one for one in to_running()
    ]
    story = Story(make_job()).tell(*events, *(ended(rank) for rank in range(4)), endings.NodeEnded("node1"))
    assert story.job.state is State.RUNNING
    assert story.tell(endings.NodeEnded("node2")).job.state is State.SUCCEEDED


def test_a_role_that_ends_the_job_and_fails_is_not_covered_by_another_that_ends() -> None:
    story = two_roles().tell(ended(2, 7), ended(0), ended(1), endings.NodeEnded("node1"), endings.NodeEnded("node2"))
    assert story.job.cause is Cause.FAILURE and story.job.first_failure is not None


def test_the_failing_rank_is_named_with_its_role() -> None:
    story = two_roles().tell(ended(3, 7))
    assert str(story.job.reason) == "rank right/1 on node2 exited with code 7"
    assert (story.job.reason.ranks, story.job.reason.values["code"]) == ((3,), 7)


def test_each_role_has_the_port_of_its_first_host() -> None:
    story = two_roles()
    assert [story.job.master_port_of(host) for host in ("node1", "node2")] == [29400, None]
