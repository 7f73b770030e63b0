"""What is asked of NPU nodes, and what is made of the answers, mangled ones too."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.health.checks import NPU_CHECKS, run_checks
from ascendrun.health.comparison import fact_rows, finding_line
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts, NpuFacts
from ascendrun.health.survey.probes import NPU_PROBES, SurveyRequest, read_npu, read_results, survey_items
from ascendrun.health.survey.scripts import CARDS, TABLE, read_sections
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.text import LANGUAGES
from tests.lib.npu_worlds import ENVIRON, PYTHON, files_text, node, ran, raw_answers, scene_of, section, world


def test_the_table_of_facts_has_the_devices_and_their_software():
    rows = {row.name: row.groups[0].value for row in fact_rows(world(node("n1")))}
    assert (rows["npus"], rows["driver"], rows["firmware"], rows["cann"]) == (
        "8 x 910B3",
        "24.1.rc2",
        "7.3.0.1.231",
        "8.0.RC3",
    )


def test_npu_questions_are_asked_of_npu_nodes_and_where_nobody_knows():
    names = {probe.name for probe in NPU_PROBES} - {"hccn-pings"}

    def asked(**request):
        return {item["name"] for item in survey_items(SurveyRequest("n", **request))} & names

    assert asked(device_type="npu") == asked(device_type=None) == names
    assert asked(device_type="cpu") == asked(device_type="cuda") == set()
    light = {item["name"]: item for item in survey_items(SurveyRequest("n", device_type="npu", is_full=False))}
    assert "npu-cards" not in light and "net_health" not in light["hccn"]["argv"]


@pytest.mark.parametrize("shell", [name for name in ("dash", "bash", "busybox") if shutil.which(name)])
@pytest.mark.parametrize("place", ["on the path", "of the installation", "nowhere"])
def test_a_device_tool_is_found_without_another_process(tmp_path: Path, shell: str, place: str) -> None:
    installed, on_path = tmp_path / "my driver" / "driver/tools", tmp_path / "pa th"
    for folder in (installed, on_path, tmp_path / "etc"):
        folder.mkdir(parents=True)
    (tmp_path / "etc/ascend_install.info").write_text(f"A=1\nDriver_Install_Path_Param={tmp_path}/my driver")
    if place != "nowhere":
        tool = (on_path if place == "on the path" else installed) / "npu-smi"
        tool.write_text(f'#!{shutil.which("sh")}\necho "NPU ID : 3: $*"\n')
        tool.chmod(0o755)
    (tmp_path / "npu-smi").mkdir()  # a directory is not a tool
    path = f":{tmp_path}:{tmp_path}/*:{on_path}"  # no other tool: sed and timeout are not there either
    sh = [str(shutil.which(shell)), *(["sh"] if shell == "busybox" else [])]
    env = {"PATH": path, "ASCENDRUN_SIM_ROOT": str(tmp_path)}
    done = subprocess.run([*sh, "-c", TABLE, "ascendrun"], capture_output=True, text=True, env=env, check=True)
    (first, *_) = read_sections(done.stdout)
    assert first.labels == (("none",) if place == "nowhere" else ("info",))
    assert first.text.strip() == ("" if place == "nowhere" else "NPU ID : 3: info")
    cards = subprocess.run([*sh, "-c", CARDS, "ascendrun", "ecc"], capture_output=True, text=True, env=env)
    assert cards.returncode == 0 and "ecc" not in cards.stdout  # its list goes through sed


def test_sections_come_apart_whatever_stands_in_them():
    text = "noise\n" + section("a 1", "x\n") + section("b", "no end of line") + section("c", "", 7) + "@@ d 2\nhalf"
    read = [(one.labels, one.text, one.code) for one in read_sections(text)]
    assert read == [(("a", "1"), "x\n", 0), (("b",), "no end of line", 0), (("c",), "", 7), (("d", "2"), "half", None)]


def test_a_number_that_was_cut_is_not_taken_for_a_whole_one():
    whole = raw_answers(Scenario())["npu-smi"]["out"]
    cut = whole[: whole.index("3380")] + "3"
    facts = read_npu(read_results({"npu-smi": ran(cut, code=None, timed_out=True)}))
    assert facts.table.hung and all(chip.hbm_used_mb != 3 for chip in facts.table.info.chips)


RAW = raw_answers(Scenario(cards=2), owners={1: ("u", "c", "t.1")}, pings=[(0, "29.1.1.10")])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_mangled_answers_never_make_a_check_fall_over_and_every_finding_has_words(data):
    answers = {}
    for name, raw in RAW.items():
        mangled = dict(raw)
        text = mangled.get("out", "")
        if text and data.draw(st.booleans()):
            low = data.draw(st.integers(0, len(text) - 1))
            high = data.draw(st.integers(low, min(len(text), low + 60)))
            mangled["out"] = text[:low] + data.draw(st.text(max_size=8)) + text[high:]
        if data.draw(st.integers(0, 5)):
            answers[name] = mangled
    ill = NodeFacts("n2", npu=read_npu(read_results(answers)), python=PYTHON, environ=ENVIRON, arch="aarch64")
    known = {code for check in NPU_CHECKS for code in check.codes}
    for finding in run_checks(world(SOUND, ill, family=data.draw(st.sampled_from(["npu", None])))):
        if finding.code in known:
            for lang in LANGUAGES:
                assert "?" not in finding_line(finding).render(lang) or "?" in str(finding.values), finding


SOUND = node("n1", Scenario(cards=2))


def test_nothing_known_finds_nothing():
    for family in ("npu", None, "cpu"):
        assert run_checks(CheckContext(facts={"n1": NodeFacts("n1")}, device_type=family)) == ()
    assert NpuFacts().chip is None


def test_the_files_of_the_node_are_read_whatever_layout_cann_has():
    for version in ("8.0.RC3", "8.5.0", "9.0.0"):
        scenario = Scenario(cann=version)
        text = files_text(scenario, scene_of(scenario))
        facts = read_npu(read_results({"ascend-files": ran(text)}))
        assert facts.cann.version == version and facts.driver_version == "24.1.rc2"
