"""What many recorded nodes cost the head from their answers to the screen, and what the screen then shows."""

import json
import sys

import pytest

from ascendrun.cli.commands.doctor import print_report
from ascendrun.head.protocol.control_messages import SurveyReply
from ascendrun.head.survey.survey_reader import read_world
from ascendrun.health.checks import choose_checks, run_checks
from ascendrun.health.comparison import make_report
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario
from tests.lib.recorded_reports import recorded_answers
from tests.thorough import examples

pytestmark = pytest.mark.slow
NODES = examples(250, thorough=1000)
MOST_CALLS_PER_NODE = 7500
"""6,200; time is no measure, since it also depends on what other work leaves in the caches of the machine."""
ODD = {
    "npu0050": Scenario(driver="23.0.7", firmware="7.1.0.11.220"),
    "npu0070": Scenario(cards=7),
    "npu0060": Scenario(faults=(PlannedFault("link_down", 3),)),
}


@pytest.fixture(scope="module")
def answers():
    return recorded_answers(NODES, differing=ODD)


def aggregate(answers):
    """All that stands between the controller's last answer and the screen, as the light look does it."""
    world = read_world([SurveyReply.from_header(one) for one in answers], None, device_type="npu", now_s=0.0)
    findings = run_checks(world, is_full=False)
    report = make_report(world, findings, checks=len(choose_checks(is_full=False)), wall_s=1.0)
    print_report(report, color=False, wide=False)
    return report


def calls_of(work):
    """How many functions `work` calls, Python's own and built-in ones: the same on every machine, however busy."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_many_answers_become_a_screen_with_less_than_7500_calls_a_node(answers, capsys):
    aggregate(json.loads(json.dumps(answers[:10])))  # what is imported and compiled once
    copy = json.loads(json.dumps(answers))
    per_node = calls_of(lambda: aggregate(copy)) / NODES
    with capsys.disabled():
        print(f" [{per_node:.0f} calls a node]", end="")
    assert per_node < MOST_CALLS_PER_NODE


def test_of_many_nodes_the_screen_shows_what_differs_and_little_else(answers, capsys):
    report = aggregate(answers)
    told = {(view.code, view.hosts) for view in report.findings}
    assert told == {
        ("npu-missing", ("npu0070",)),
        ("device-link-down", ("npu0060",)),
        ("driver-differs", ("npu0050",)),
        ("firmware-differs", ("npu0050",)),
    }
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 400
    assert f"driver    24.1.rc2  npu[0001-0049,0051-{NODES:04d}]" in lines
