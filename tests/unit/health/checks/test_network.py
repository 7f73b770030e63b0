"""Checks of ports and addresses."""

from ascendrun.core.findings import Severity
from ascendrun.core.network import candidate_bases
from ascendrun.health.survey.facts import ConnectionTest, PortHolder
from tests.lib.host_worlds import JOB, found, sound, world

BASES = candidate_bases("doctor", {})


def test_the_first_address_that_a_node_prints_may_be_a_bridges():
    addresses = {"lo": ("127.0.0.1",), "docker0": ("172.17.0.1",), "eth0": ("10.0.0.2",)}

    def told(address):
        node = sound("n2", addresses=addresses, environ={"HCCL_IF_IP": address})
        return [(one.severity, one.values) for one in found(world(node, family="npu"), "if-ip-elsewhere")]

    values = {"value": "172.17.0.1", "interface": "docker0", "routes": ("eth0",)}
    assert told("172.17.0.1") == [(Severity.WARN, values)]
    assert told("10.0.0.2") == []


def test_the_users_own_master_port_must_be_free_where_the_ranks_meet():
    job = JOB % "cpu" + "env: {MASTER_PORT: 45000}\n"
    (one,) = found(
        world(sound("n1", taken_ports={45000: PortHolder(1000, 4711, "python old.py")}), job=job), "port-taken"
    )
    assert one.hosts == ("n1",) and one.values["port"] == 45000 and one.values["holder"].values["pid"] == 4711
    assert not found(world(sound("n2", taken_ports={45000: PortHolder()}), job=job), "port-taken")
    assert found(world(job=job), "port-ephemeral")[0].severity is Severity.NOTE


def test_ports_of_a_running_job_stop_another_job_if_no_block_of_its_choice_is_free():
    holder = PortHolder(0, 77, "python train.py", "h-j-9.1")
    job = JOB % "npu" + "env: {HCCL_IF_BASE_PORT: 60000}\n"
    for port in (60000, 60031):
        world_of_job = world(sound("n2", taken_ports={port: holder}), family="npu", job=job)
        (one,) = found(world_of_job, "hccl-port-taken")
        assert one.severity is Severity.FAIL and one.values["holder"].values["run_id"] == one.values["run"] == "h-j-9.1"
    one_block = sound("n2", taken_ports={BASES[0]: holder})
    assert not found(world(one_block, family="npu"), "hccl-port-taken")
    assert not found(world(sound("n2", taken_ports={60000: holder}), family="npu"), "hccl-port-taken")


def test_a_run_that_leases_the_block_between_the_survey_and_the_connection_test_is_waited_for():
    """Of two heads that start at once; it is no refusal by the peer."""
    refused = (ConnectionTest("n2", "10.0.0.2", BASES[0], "connection refused", "refused"),)
    blocked = sound("n2", leased_block=(BASES[0], PortHolder(0, tag="h-j-9.1")))
    both = world(sound("n1", connection_tests=refused), blocked, family="npu", job=JOB % "npu")
    (one,) = found(both, "hccl-port-taken")
    assert (one.hosts, one.severity, one.values["run"]) == (("n2",), Severity.FAIL, "h-j-9.1")
    assert not found(both, "peer-refuses")
    assert found(world(sound("n1", connection_tests=refused), sound("n2"), family="npu"), "peer-refuses")
