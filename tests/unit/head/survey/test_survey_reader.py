"""What many recorded nodes cost the head from their answers to the screen, and what the screen then shows."""

import json
import math
import time

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
MOST_REFERENCES = 2.5
"""1.4 to 2.0, as busy as the machine's caches are; before anything was read once for all nodes it was 3 of them."""
MOST_TRIES = 9
ROUNDS_PER_NODE = 20_000
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


def reference():
    """A plain loop, as a measure of this machine at this moment."""
    total = 0
    for number in range(NODES * ROUNDS_PER_NODE):
        total += number & 7
    return total


def cpu_s(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def test_many_answers_become_a_screen_for_less_than_a_plain_loop_of_50_thousand_rounds_a_node(answers, capsys):
    text, pairs, work_s, unit_s = json.dumps(answers), [], math.inf, 0.0
    # taken in turns, the best of each: other work takes the caches of the machine
    while work_s >= MOST_REFERENCES * unit_s and len(pairs) < MOST_TRIES:
        copy = json.loads(text)
        pairs.append((cpu_s(lambda copy=copy: aggregate(copy)), cpu_s(reference)))
        work_s, unit_s = (min(column) for column in zip(*pairs))
    with capsys.disabled():
        print(f" [{NODES} nodes: {work_s:.2f} s of CPU, reference {unit_s:.2f} s]", end="")
    assert work_s < MOST_REFERENCES * unit_s, pairs


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
