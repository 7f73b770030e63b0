"""The simulated tools as programs: what they need, what runs on the devices, and faults switched on meanwhile."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ascendrun.ascend import hccn, npu_smi, npu_smi_views
from ascendrun.core.errors import InvalidInputError, NotFoundError
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.__main__ import main
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tool.live import device_of
from ascendrun.sim.ascend.tool.model import KINDS
from tests.lib.ascend_recordings import npu_ids
from tests.lib.ascend_scenes import hccn as ask_port
from tests.lib.ascend_scenes import scene_of, smi

DEADLINE_S = 60.0
SLEEPER = [sys.executable, "-c", "print('up', flush=True); import sys; sys.stdin.read()"]
_PYENV = Path(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
OLD_PYTHON = next(iter(sorted(_PYENV.glob("versions/3.7.*/bin/python"))), None)


def info_of(node):
    done = node.run("npu-smi", "info")
    assert done.returncode == 0, done.stderr
    return npu_smi.parse_info(done.stdout)


def awaited(look, wanted, deadline_s=DEADLINE_S):
    """What `look` gives once `wanted` holds of it; what it gave last when the deadline passes."""
    end_s = time.monotonic() + deadline_s
    while True:
        found = look()
        if wanted(found) or time.monotonic() > end_s:
            return found
        time.sleep(0.05)


class Rank:
    """A process that uses a device until the block ends."""

    def __init__(self, node, environ, argv=SLEEPER, **options):
        self._process = node.popen(
            *argv, more=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )

    def __enter__(self):
        assert self._process.stdout.readline() == "up\n"
        return self._process

    def __exit__(self, *_):
        self._process.communicate(timeout=DEADLINE_S)


# -- the programs


def test_the_tools_answer_and_say_nothing_else(sim_node):
    for argv in (("npu-smi", "info"), ("npu-smi", "-v"), ("hccn_tool", "-i", "0", "-link", "-g")):
        done = sim_node.run(*argv)
        assert done.returncode == 0 and done.stdout and done.stderr == ""


def test_the_tools_need_no_environment_and_no_python_on_path(sim_node):
    done = subprocess.run(
        [sim_node.root / "usr/local/Ascend/driver/tools/hccn_tool", "-i", "7", "-ip", "-g"],
        env={}, cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert hccn.parse_ip(done.stdout).address == "29.1.1.17"


def test_the_tree_works_wherever_it_is_moved(sim_node, tmp_path):
    moved = sim_node.root.rename(tmp_path / "elsewhere")
    for path in ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi"):
        assert "910B3" in subprocess.run([moved / path, "info"], capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(OLD_PYTHON is None, reason="no Python 3.7 on this machine")
def test_the_tools_run_on_the_oldest_python_of_a_node(sim_node):
    sim_node.install(Scenario(chip="910_93"), python=str(OLD_PYTHON))
    assert len(info_of(sim_node).chips) == 16
    assert hccn.parse_link(sim_node.run("hccn_tool", "-i", "15", "-link", "-g").stdout).is_up


def test_a_reader_that_goes_away_ends_the_tool_without_a_word(sim_node):
    done = sim_node.run("sh", "-c", "npu-smi info | head -1; npu-smi info watch | head -1")
    assert len(done.stdout.splitlines()) == 2 and done.stderr == ""


def test_watch_goes_on_until_it_is_told_to_stop(sim_node):
    watch = sim_node.popen("npu-smi", "info", "watch", "-i", "2", "-d", "1", stdout=subprocess.PIPE, text=True)
    try:
        lines = [watch.stdout.readline() for _ in range(3)]
    finally:
        watch.terminate()
        watch.communicate(timeout=DEADLINE_S)
    assert lines[0].startswith("NpuID(Idx)") and [line.split()[0] for line in lines[1:]] == ["2", "2"]


def test_installing_again_leaves_nothing_of_the_node_before(sim_node):
    tree.set_fault(sim_node.root, 1, "dropped")
    sim_node.install(Scenario(chip="910A", cann="8.5.0"))
    info = info_of(sim_node)
    assert len(info.chips) == 8 and info.chips[0].name == "910A"
    assert not (sim_node.root / "usr/local/Ascend/ascend-toolkit/8.0.RC3").exists()


# -- processes


def test_a_process_on_a_device_stands_in_the_table_and_loads_its_card(sim_node):
    idle = info_of(sim_node).chips[3]
    marks = {"ASCENDRUN_SIM_NPU": "3", "ASCENDRUN_SIM_NPU_PROCESS_MB": "41000", "ASCENDRUN_SIM_NPU_LOAD": "77"}
    with Rank(sim_node, marks) as rank:
        info = info_of(sim_node)
        comm = Path(f"/proc/{rank.pid}/comm").read_text().strip()
        shown = [(one.npu_id, one.pid, one.name, one.memory_mb) for one in info.processes]
        assert shown == [(3, rank.pid, comm, 41000)]
        busy = info.chips[3]
        assert busy.load_percent == 77 and busy.hbm_used_mb == idle.hbm_used_mb + 41000
        assert busy.power_w > idle.power_w + 100 and info.chips[2].load_percent == 0
        memory = sim_node.run("npu-smi", "info", "-t", "proc-mem", "-i", "3").stdout
        assert f"Process id:{rank.pid} " in memory or f"Process id:{rank.pid}\t" in memory, memory
    after = info_of(sim_node)
    assert after.processes == () and after.chips[3] == idle


def test_two_nodes_in_folders_of_one_machine_show_each_its_own_processes(sim_node, tmp_path):
    other = type(sim_node)(tmp_path / "other").install(Scenario())
    with Rank(sim_node, {"ASCENDRUN_SIM_NPU": "3"}) as rank:
        assert [one.pid for one in info_of(sim_node).processes] == [rank.pid]
        assert info_of(other).processes == ()


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        ({}, None),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}, None),
        ({"ASCENDRUN_SIM_NPU": "7"}, 7),
        ({"ASCENDRUN_SIM_NPU": "8"}, None),
        ({"ASCENDRUN_SIM_NPU": "auto"}, 0),
        ({"ASCENDRUN_SIM_NPU": "auto", "LOCAL_RANK": "5"}, 5),
        ({"ASCENDRUN_SIM_NPU": "auto", "ASCEND_RT_VISIBLE_DEVICES": "3"}, 3),
        ({"ASCENDRUN_SIM_NPU": "auto", "ASCEND_RT_VISIBLE_DEVICES": "3", "LOCAL_RANK": "1"}, 3),
        ({"ASCENDRUN_SIM_NPU": "auto", "ASCEND_RT_VISIBLE_DEVICES": "4,5,6", "LOCAL_RANK": "2"}, 6),
        ({"ASCENDRUN_SIM_NPU": "nonsense", "LOCAL_RANK": "1"}, None),
    ],
)
def test_only_a_marked_process_uses_a_device_and_only_one_that_is_there(environ, device):
    assert device_of(environ, 8) == device


def test_a_worker_that_inherits_the_mark_is_not_shown_beside_its_parent(sim_node):
    forks = (
        "import os, sys; os.fork() or (sys.stdin.read(), os._exit(0)); "
        "print('up', flush=True); sys.stdin.read(); os.wait()"
    )
    with Rank(sim_node, {"ASCENDRUN_SIM_NPU": "0"}, [sys.executable, "-c", forks]) as rank:
        assert [one.pid for one in info_of(sim_node).processes] == [rank.pid]


def test_a_file_kept_open_marks_a_process_and_says_what_it_uses(sim_node):
    marker = sim_node.root / "var/lib/ascend-sim/npu/5.rank5"
    marker.write_text("12345 40")
    holds = "import sys; kept = open(sys.argv[1]); print('up', flush=True); sys.stdin.read()"
    with Rank(sim_node, {}, [sys.executable, "-c", holds, str(marker)]) as rank:
        info = info_of(sim_node)
        assert [(one.npu_id, one.pid, one.memory_mb) for one in info.processes] == [(5, rank.pid, 12345)]
        assert info.chips[5].load_percent == 40
    assert info_of(sim_node).processes == ()


def test_a_loaded_card_warms_up(sim_node):
    with Rank(sim_node, {"ASCENDRUN_SIM_NPU": "1"}):
        first = info_of(sim_node).chips[1].temperature_c
        assert awaited(lambda: info_of(sim_node).chips[1].temperature_c, lambda heat: heat > first) > first


# -- faults while it runs


def test_a_card_drops_at_a_moment_and_comes_back_when_the_fault_is_undone(sim_node):
    tree.set_fault(sim_node.root, 3, "dropped", after_s=1000)
    assert len(info_of(sim_node).chips) == 8
    tree.set_fault(sim_node.root, 3, "dropped", after_s=0.3)
    left = awaited(lambda: npu_ids(info_of(sim_node)), lambda ids: len(ids) == 7)
    assert left == (0, 1, 2, 4, 5, 6, 7)
    tree.clear_fault(sim_node.root, 3, "dropped")
    assert len(info_of(sim_node).chips) == 8


def test_a_driver_reset_answers_nothing_for_a_while_and_leaves_seven_devices(sim_node):
    with Rank(sim_node, {"ASCENDRUN_SIM_NPU": "2"}) as rank:
        tree.set_fault(sim_node.root, 6, "driver_reset", value="3600")
        away = sim_node.run("npu-smi", "info")
        assert away.returncode and npu_smi.parse_info(away.stdout).errors[0].code == -8005
        tree.set_fault(sim_node.root, 6, "driver_reset", value="0.1")
        done = awaited(lambda: sim_node.run("npu-smi", "info"), lambda done: done.returncode == 0)
        info = npu_smi.parse_info(done.stdout)
        assert npu_ids(info) == (0, 1, 2, 3, 4, 5, 7)
        assert [one.pid for one in info.processes] == [rank.pid]


DEAF_TO = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.parametrize(("value", "hangs", "answers"), [
    (None, ("npu-smi", "hccn_tool"), ()), ("npu-smi", ("npu-smi",), ("hccn_tool",)),
])  # fmt: skip
def test_a_hanging_tool_ends_on_no_signal_but_kill(sim_node, value, hangs, answers):
    tree.set_fault(sim_node.root, None, "hang", value=value)
    arguments = {"npu-smi": ("info",), "hccn_tool": ("-i", "0", "-link", "-g")}
    for tool in answers:
        assert sim_node.run(tool, *arguments[tool]).returncode == 0
    for tool in hangs:
        process = sim_node.popen(tool, *arguments[tool], stdout=subprocess.PIPE)
        try:
            assert awaited(lambda pid=process.pid: all(ignores(pid, number) for number in DEAF_TO), bool)
            for number in DEAF_TO:
                process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
        finally:
            process.kill()
            out, _ = process.communicate(timeout=DEADLINE_S)
        assert out == b"" and process.returncode == -signal.SIGKILL


def ignores(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigIgn:\s*([0-9a-f]+)", status)[1], 16) >> (number - 1) & 1)


def test_a_slow_tool_answers_all_the_same(sim_node):
    tree.set_fault(sim_node.root, None, "slow", value="0.4")
    began_s = time.monotonic()
    assert len(info_of(sim_node).chips) == 8 and time.monotonic() - began_s >= 0.4


def test_a_trickling_tool_gives_its_bytes_one_by_one(sim_node):
    tree.set_fault(sim_node.root, None, "trickle", value="0.05")
    end, start = os.pipe2(os.O_DIRECT)  # a packet for each write, however late it is read
    process = sim_node.popen("npu-smi", "-v", stdout=start)
    os.close(start)
    with open(end, "rb", buffering=0) as pipe:
        chunks = list(iter(lambda: pipe.read(65536), b""))
    process.wait(DEADLINE_S)
    assert b"".join(chunks) == b"npu-smi version: 24.1.rc2\n" and {len(chunk) for chunk in chunks} == {1}


def test_garbage_and_half_an_answer_are_read_without_a_wrong_card(sim_node):
    whole = info_of(sim_node)
    tree.set_fault(sim_node.root, None, "truncated")
    half = npu_smi.parse_info(sim_node.run("npu-smi", "info").stdout)
    assert set(half.chips) <= set(whole.chips)
    assert half != whole
    tree.clear_all(sim_node.root)
    tree.set_fault(sim_node.root, None, "garbage")
    done = sim_node.run("npu-smi", "info", encoding="utf-8", errors="replace")
    assert npu_smi.parse_info(done.stdout).chips == () and npu_smi.parse_info(done.stdout).unparsed


def test_the_tool_warns_while_the_drivers_install_record_is_not_complete(sim_node):
    assert not info_of(sim_node).driver_incomplete
    record = sim_node.root / "etc/ascend_install.info"
    record.chmod(0o644)
    record.write_text(record.read_text().replace("complete", "installing"))
    assert info_of(sim_node).driver_incomplete


def test_another_user_gets_no_compatibility_and_no_ports():
    scene = scene_of(Scenario(), is_privileged=False)
    assert npu_smi_views.parse_board(smi(scene, "info", "-t", "board", "-i", 0)).compatibility == "NOT SUPPORT"
    assert hccn.parse_link(ask_port(scene, 0, "link")).errors[0].kind == "permission"


# -- switching faults


def test_faults_set_at_the_same_time_are_all_kept(sim_node):
    threads = [
        threading.Thread(target=tree.set_fault, args=(sim_node.root, card, name))
        for card in range(8)
        for name in ("link_down", "fec_none", "tls_on")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(tree.list_faults(sim_node.root)) == 24


def test_a_fault_set_again_begins_anew_and_undoing_one_leaves_the_others(sim_node):
    tree.set_fault(sim_node.root, 0, "ecc_single", value="1000")
    first = tree.list_faults(sim_node.root)[0]
    tree.set_fault(sim_node.root, 0, "ecc_single", value="7")
    tree.set_fault(sim_node.root, 1, "ecc_single")
    tree.set_fault(sim_node.root, None, "slow")
    again = [one for one in tree.list_faults(sim_node.root) if (one.name, one.card) == ("ecc_single", 0)]
    assert len(again) == 1 and again[0].value == "7" and again[0].since_s >= first.since_s
    tree.clear_fault(sim_node.root, 0, "ecc_single")
    tree.clear_fault(sim_node.root, 0, "ecc_single")
    assert [(one.name, one.card) for one in tree.list_faults(sim_node.root)] == [("ecc_single", 1), ("slow", None)]


@pytest.mark.parametrize(
    ("card", "name", "value", "says"),
    [
        (8, "dropped", None, "there is no card 8"),
        (None, "dropped", None, "there is no card None"),
        (0, "hang", None, "affects the node"),
        (0, "droped", None, "unknown"),
        (0, "link_down", "5", "does not accept a value"),
        (None, "slow", "soon", "must be a number above 0"),
        (None, "slow", "nan", "must be a number above 0"),
        (0, "link_flaps", "0", "must be a number above 0"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_and_nothing_changes(sim_node, card, name, value, says):
    with pytest.raises(InvalidInputError) as refused:
        tree.set_fault(sim_node.root, card, name, value=value)
    assert says in refused.value.problems[0].message
    assert tree.list_faults(sim_node.root) == []


# -- the command line


def test_the_command_line_installs_breaks_and_mends_a_node(tmp_path, capsys):
    root = str(tmp_path / "node")
    scenario = tmp_path / "a.yaml"
    scenario.write_text("chip: 910A\ndriver: 23.0.5\nfaults: [{name: link_down, card: 1}]\n")
    assert main(["install", root, "--scenario", str(scenario), "--cards", "4"]) == 0
    assert main(["fault", root, "2", "dropped"]) == 0
    assert main(["fault", root, "node", "slow", "--value", "0.1", "--after", "1000"]) == 0
    capsys.readouterr()
    assert main(["show", root]) == 0
    shown = capsys.readouterr().out
    assert "link_down" in shown and "dropped" in shown and "begins in" in shown
    tool = Path(root, "usr/local/bin/npu-smi")
    done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=60)
    assert npu_ids(npu_smi.parse_info(done.stdout)) == (0, 1, 3)
    assert main(["clear", root, "2", "dropped"]) == 0 and main(["clear", root, "node"]) == 0
    assert [(one.name, one.card) for one in tree.list_faults(Path(root))] == [("link_down", 1)]
    assert main(["clear", root]) == 0 and tree.list_faults(Path(root)) == []


def test_the_command_line_says_what_is_wrong_and_knows_every_fault(tmp_path, capsys):
    assert main(["fault", str(tmp_path), "0", "dropped"]) == NotFoundError.exit_code
    assert "no simulated node" in capsys.readouterr().err
    assert main(["install", str(tmp_path / "n"), "--layout", "L4"]) == 2
    assert "layout: L4" in capsys.readouterr().err
    assert main(["install", str(tmp_path / "n")]) == 0
    assert main(["fault", str(tmp_path / "n"), "zero", "dropped"]) == 2
    assert main(["fault", str(tmp_path / "n"), "0", "droped"]) == 2
    assert "did you mean dropped?" in capsys.readouterr().err
    assert main(["faults"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in KINDS)
