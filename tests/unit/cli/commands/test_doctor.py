"""What doctor says of a report: exit codes, one screen, nothing of a node steers the terminal, a script that is one."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from ascendrun.cli.commands.doctor import exit_code, print_report, print_script
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.node_messages import Failure
from ascendrun.health.comparison import DoctorReport, make_report
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts

FAIL, WARN, NOTE = Severity.FAIL, Severity.WARN, Severity.NOTE
GONE = Failure("unreachable", "n9: no route to host", "check the cable")


def report_of(
    *findings: Finding, hosts: int = 3, unreached: dict[str, Failure] | None = None, **facts: Any
) -> DoctorReport:
    world = CheckContext(
        facts={f"n{number}": NodeFacts(f"n{number}", **facts) for number in range(1, hosts + 1)},
        unreached=unreached or {},
    )
    return make_report(world, findings, checks=7, wall_s=1.0)


@pytest.mark.parametrize(
    "findings, fail_on, code",
    [
        ([], "fail", 0),
        ([Finding("disk-low", WARN, ("n1",))], "fail", 0),
        ([Finding("disk-low", WARN, ("n1",))], "warn", 3),
        ([Finding("os-differs", NOTE, ("n1",))], "warn", 0),
        ([Finding("os-differs", NOTE, ("n1",))], "note", 3),
        ([Finding("disk-full", FAIL, ("n1",))], "note", 3),
    ],
)
def test_the_exit_code_tells_the_worst_that_was_asked_for(findings: list[Finding], fail_on: str, code: int) -> None:
    assert exit_code(report_of(*findings), fail_on=fail_on) == code


def test_who_is_not_reached_is_6_unless_somebody_is_unfit_and_5_when_nobody_is() -> None:
    missed = Finding("unreachable", FAIL, ("n9",))
    assert exit_code(report_of(missed, unreached={"n9": GONE}), fail_on="fail") == 6
    unfit = Finding("disk-full", FAIL, ("n1",))
    assert exit_code(report_of(missed, unfit, unreached={"n9": GONE}), fail_on="fail") == 3
    assert exit_code(report_of(missed, hosts=0, unreached={"n9": GONE}), fail_on="fail") == 5


def test_a_finding_shows_nodes_code_evidence_and_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding(
        "kernel-differs", WARN, ("n1", "n2"), {"value": "4.19", "majority": "5.10"}, ("n3: 5.10", "n[1-2]: 4.19")
    )
    print_report(report_of(finding), color=False, wide=False)
    out = capsys.readouterr().out
    assert all(part in out for part in ("n[1-2]  ", "4.19", "[kernel-differs]", "| n3: 5.10", "1 WARN"))


def test_a_thousand_nodes_do_not_flood_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    odd = tuple(f"n{number}" for number in range(1, 1001, 2))
    finding = Finding("disk-full", FAIL, odd, {"path": "/", "free": 0}, tuple(f"line {n}" for n in range(50)))
    print_report(report_of(finding, hosts=1000, kernel="5.10"), color=False, wide=False)
    out = capsys.readouterr().out
    assert "500 hosts (" in out and len(out) < 2500
    print_report(report_of(finding, hosts=1000, kernel="5.10"), color=False, wide=True)
    assert "line 49" in capsys.readouterr().out


def test_what_a_node_says_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("login-noise", NOTE, ("n1",), {"line": "\x1b]0;owned\x07 hi"}, ("\x1b[2J gone",))
    report = report_of(finding, kernel="\x1b[31mred")
    for show in (lambda: print_report(report, color=False, wide=True), lambda: print_script(report, None)):
        show()
        assert "\x1b" not in capsys.readouterr().out


def test_the_script_is_shell_and_names_of_nodes_stay_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_script(
        report_of(
            Finding("kill-user-processes", WARN, ("n1", "n2"), {"user": "me; rm -rf /"}),
            Finding("disk-full", FAIL, ("n3",), {"path": "/a\nb", "free": 0}),
        ),
        "my hosts.txt",
    )
    script = capsys.readouterr().out
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).returncode == 0
    said = subprocess.run(
        ["sh"], input=script.replace("ascendrun exec", "printf '%s\\n'"), text=True, capture_output=True
    )
    assert said.stdout.splitlines() == [
        "-H",
        "my hosts.txt",
        "--hosts",
        "n[1-2]",
        "--",
        "sh",
        "-c",
        "loginctl enable-linger 'me; rm -rf /'",
    ]
