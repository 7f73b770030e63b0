from dataclasses import replace

import pytest
from ascend_recordings import FOLDER, read

from ascendrun.ascend.rank_table import check_rank_table, read_rank_table, write_rank_table


def recorded(name):
    return read_rank_table(read(FOLDER / "rank-table" / f"{name}.txt"))


@pytest.mark.parametrize("name", ["v1.0", "v1.2"])
def test_a_good_table_has_no_faults_and_survives_being_written(name):
    table = recorded(name)
    assert check_rank_table(table) == () and read_rank_table(write_rank_table(table)) == table


def test_a_legacy_table_is_read_but_not_written():
    table = recorded("legacy")
    assert (table.version, table.device_count, check_rank_table(table)) == ("legacy", 2, ())
    with pytest.raises(ValueError, match="legacy"):
        write_rank_table(table)


def test_all_faults_are_listed_together_each_with_its_place_and_way_out():
    faults = check_rank_table(recorded("many-faults"))
    assert [fault.code for fault in faults] == [
        "number", "server-count", "ranks", "server-twice", "address-twice", "address-family", "no-address",
    ]  # fmt: skip
    assert faults[0].where == "server_list[0].device[1].device_id" and all(fault.hint for fault in faults)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"a": 1, "a": 2}', "[" * 100000, '{"server_list": [7]}', "{}"])
def test_what_is_no_rank_table_has_faults_and_raises_nothing(text):
    assert check_rank_table(read_rank_table(text))


def test_a_comment_is_told_as_what_hccl_cannot_read():
    assert "no comments" in recorded("with-comment").faults[0].hint


def test_a_table_with_faults_is_not_written():
    table = recorded("v1.0")
    with pytest.raises(ValueError, match="server_count 3"):
        write_rank_table(replace(table, server_count=3))


def test_a_super_pod_must_hold_every_server_once_and_no_other():
    table = recorded("v1.2")
    pods = (("0", ("node0",)), ("1", ("node0", "ghost")))
    codes = [fault.code for fault in check_rank_table(replace(table, super_pods=pods))]
    assert codes == ["no-super-pod", "unknown-server", "two-super-pods"]


def test_a_super_device_id_stands_once_in_a_pod():
    table = recorded("v1.2")
    servers = tuple(
        replace(server, devices=tuple(replace(device, super_device_id=0) for device in server.devices))
        for server in table.servers
    )
    assert [fault.code for fault in check_rank_table(replace(table, servers=servers))] == ["super-device-twice"]
