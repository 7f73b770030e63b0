"""Commands on many hosts: equal output once, failures by host."""

from __future__ import annotations

import json

from ascendrun.cluster import ExecResult
from ascendrun.core.errors import UnreachableError
from ascendrun.core.node_messages import Failure
from ascendrun.text import Text
from tests.lib.story_cluster import Desk


def answer(
    host: str,
    out: bytes = b"",
    err: bytes = b"",
    code: int | None = 0,
    why: Text | str | None = None,
    named: str | None = None,
) -> ExecResult:
    return ExecResult(host, code, out, err, why, 0.1, named)


def test_exec_shows_identical_output_once_under_folded_names(desk: Desk) -> None:
    desk.cluster.answers = [answer("n2", b"5.10\n"), answer("n1", b"5.10\n")]
    result = desk.say("exec", "--hostfile", "all.hosts", "--", "uname", "-r")
    assert (result.code, result.out) == (0, "---------------\nn[1-2] (2)\n---------------\n5.10\n")
    assert desk.cluster.calls == [("execute", ("n1", "n2"), ("uname", "-r"), None)]


def test_exec_with_failures_exits_6_and_names_the_hosts(desk: Desk) -> None:
    desk.cluster.answers = [answer("n1", b"ok\n", b"warn\x1b[2J\n", 3), answer("n2", code=None, why="no route to host")]
    result = desk.say("exec", "-H", "all.hosts", "--timeout", "5m", "ls", "-l")
    assert result.code == 6
    assert result.out == "---------------\nn1\n---------------\nok\n"
    assert "n1 stderr\n---------------\nwarn\n" in result.err
    assert "error: n1: exit code 3\nerror: n2: no route to host\n2 of 2 hosts failed" in result.err
    assert desk.cluster.calls[0][2:] == (("ls", "-l"), 300.0)


def test_a_host_is_named_once_where_a_connection_failed(desk: Desk) -> None:
    english = "{host} ({endpoint}): no key for the login"
    refused = Failure.of(UnreachableError.of("ssh.no-key", english, "try", host="n2", endpoint="10.0.0.2:22"))
    other = Failure.of(UnreachableError.of("t.other", "{host}: see", host="gateway"))
    desk.cluster.answers = [
        answer("n2", code=None, why=refused.line(), named=refused.host),
        answer("n1", code=None, why=other.line(), named=other.host),
    ]
    err = desk.say("exec", "-H", "all.hosts", "ls").err
    assert err.count("n2") == 1 and "error: n2 (10.0.0.2:22): " in err
    assert "error: n1: gateway: " in err
    assert str(Failure.from_json(refused.to_json()).problem_of("n2")).count("n2") == 1
    assert str(refused.problem_of("n1")).startswith("n1: n2 (")


def test_exec_on_some_hosts_of_the_file_or_on_names_alone(desk: Desk) -> None:
    desk.say("exec", "-H", "all.hosts", "--hosts", "@g", "--", "true")
    desk.say("exec", "--hosts", "x[1-2],user@y", "--", "true")
    assert [call[1] for call in desk.cluster.calls] == [("n1",), ("x1", "x2", "y")]


def test_exec_as_json_keeps_every_answer(desk: Desk) -> None:
    desk.cluster.answers = [answer("n1", b"\xff\n", code=1)]
    results = json.loads(desk.say("exec", "-H", "all.hosts", "-o", "json", "--", "x").out)["results"]
    assert (results[0]["exit_code"], results[0]["stdout"]) == (1, "\ufffd\n")
