"""Roles in a job file: what they inherit, and odd input in one report."""

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.pipeline import StageJob
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.core.jobs.roles import parts_of

SERVE = "{name: serve, nodes: 2, command: [sleep, 9], env: {A: 2}, ends_job: false}"
WORK = "{name: work, command: [sleep, 1], devices: {per_node: 4}}"
COMMON = "name: pd\nhostfile: h\nenv: {A: 1, B: 1}\ndevices: {type: npu, per_node: 8}\n"


def stages(text: str) -> tuple[StageJob, ...]:
    return parse_stages(text, "job.yaml", programs={})


def test_a_role_is_a_job_with_its_own_command_env_and_devices() -> None:
    [job] = stages(COMMON + f"roles: [{SERVE}, {WORK}]\n")
    serve, work = parts_of(job.spec)
    assert job.spec.nodes == 3 and (serve.role, serve.ends_job, work.ends_job) == ("serve", False, True)
    assert serve.spec.env == {"A": "2", "B": "1"} and work.spec.env == {"A": "1", "B": "1"}
    assert serve.spec.command == ("sleep", "9") and not serve.spec.roles
    assert (serve.spec.devices.per_node, work.spec.devices.type, work.spec.devices.per_node) == (8, "npu", 4)


def test_a_stage_has_roles_or_replaces_those_of_the_file() -> None:
    text = COMMON + f"roles: [{SERVE}, {WORK}]\nstages: [{{name: a}}, {{name: b, command: [x]}}]\n"
    first, second = stages(text)
    assert len(first.spec.roles) == 2 and not second.spec.roles and second.spec.nodes is None
    [alone] = stages(COMMON + f"command: [x]\nnodes: 2\nstages: [{{name: a, roles: [{WORK}]}}]\n")
    assert alone.spec.command is None and alone.spec.nodes == 1


def test_odd_roles_are_refused_in_one_report_each_at_its_place() -> None:
    text = COMMON + (
        "nodes: 2\n"
        "launcher: torchrun\n"
        "command: [x]\n"
        "roles:\n"
        "  - {name: a, nodes: 0, command: sleep 10, env: {RANK: 1, MASTER_PORT: 5}, ends_job: false}\n"
        "  - {name: a, command: [torchrun, x.py], devices: {type: cuda, ids: [1, 0]}, ends_job: false}\n"
        "  - {nme: x, ends_job: false}\n"
        "  - 3\n"
    )
    with pytest.raises(InvalidInputError) as caught:
        stages(text)
    found = sorted((problem.line, getattr(problem.message, "key", "")) for problem in caught.value.problems)
    assert found == [
        (5, "roles.nodes"),
        (6, "roles.launcher"),
        (8, "jobfile.program-and-command"),
        (9, "jobfile.command-string"),
        (9, "jobfile.own-variable"),
        (9, "jobfile.value"),
        (9, "roles.master-port"),
        (10, "jobfile.ids-order"),
        (10, "jobfile.nested-launcher"),
        (10, "roles.device-type"),
        (10, "roles.duplicate"),
        (11, "jobfile.required"),
        (11, "jobfile.required"),
        (11, "jobfile.unknown-key"),
        (12, "jobfile.value"),
    ]


@pytest.mark.parametrize(
    "roles", ["3", "[]", "[[]]", "[3, null]", "{name: a}", "[{env: 3, devices: 4, nodes: x, launcher: []}]", "null"]
)
def test_anything_in_place_of_roles_is_a_report(roles: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        stages(COMMON + f"roles: {roles}\nlauncher: [x]\n")
    assert caught.value.problems
