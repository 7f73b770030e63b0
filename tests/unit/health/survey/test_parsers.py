"""From raw survey answers to facts: read leniently, never guessed; and what is shown of them."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.reports import NodeReport, Route
from ascendrun.health.comparison import fact_rows
from ascendrun.health.env_view import make_env_report, mask, write_env_file
from ascendrun.health.survey import parsers, scripts
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import NodeFacts, PythonFacts
from ascendrun.health.survey.pair_tests import ALL_PAIRS_UP_TO, choose_pairs, choose_ports, plan_connection_tests
from ascendrun.health.survey.probes import PROBES, SurveyRequest, late_probes, read_facts, read_results, survey_items
from ascendrun.health.survey.scripts import GPUS as GPU_SCRIPT
from ascendrun.text import Text


def ran(out="", *, code=0, err="", **more):
    return {
        "code": code,
        "signal": None,
        "timed_out": False,
        "truncated": False,
        "wall_s": 0.1,
        "out": out,
        "err": err,
        "setup": None,
        **more,
    }


def test_the_interpreter_is_read_behind_whatever_a_set_up_printed():
    noise = 'welcome {"executable": "liar"}\n{not json\n'
    said = json.dumps({"executable": "/opt/py", "version": "3.10.13", "modules": {"torch": None}})
    python = parsers.read_python(ran(noise + said + "\n", setup="fine"))
    assert (python.executable, python.version, python.modules) == ("/opt/py", "3.10.13", {"torch": None})
    assert python.error is None


def test_an_interpreter_that_says_nothing_tells_why():
    assert (
        str(parsers.read_python(ran(code=127, err="set_env.sh: No such file\n", setup="failed")).error)
        == "set_env.sh: No such file (exit code 127)"
    )
    assert parsers.read_python(ran(code=None, timed_out=True, wall_s=8.01)).error == Text(
        "doctor.command-timeout", "", seconds=8.01
    )
    assert parsers.read_python({"error": "no such command: python3", "late": False}).error == "no such command: python3"


def test_a_torch_that_dies_on_import_is_an_error_at_its_step():
    assert parsers.read_torch(ran(code=None, signal=11)).error == Text("doctor.command-signal", "", signal=11)
    said = json.dumps({"step": "import torch_npu", "error": "ImportError: libhccl.so"})
    torch = parsers.read_torch(ran("\n" + said))
    assert (torch.step, torch.error, torch.devices) == ("import torch_npu", "ImportError: libhccl.so", None)


def test_addresses_are_read_from_ip_and_unknown_without_it():
    out = (
        "1: lo    inet 127.0.0.1/8 scope host lo\n2: eth0    inet 10.0.0.3/24 brd 10.0.0.255 scope global eth0\n"
        "2: eth0    inet6 fe80::1/64 scope link\n3: veth1@if2    inet 10.1.0.1/24\n"
    )
    assert parsers.read_addresses(ran(out))["eth0"] == ("10.0.0.3", "fe80::1")
    assert parsers.read_addresses(ran(code=127)) is None


def test_the_first_word_of_sshd_counts_and_an_unreadable_configuration_is_unknown():
    facts = parsers.read_sshd(ran("maxstartups 10:30:100\nmaxsessions 10\nMaxSessions 3\n"))
    assert (facts.max_startups, facts.max_sessions) == ("10:30:100", 10)
    assert parsers.read_sshd(ran("")) is None


def test_the_last_word_of_logind_counts_and_comments_do_not():
    assert parsers.read_logind({"texts": {"/a": "#KillUserProcesses=yes\n"}}) is None
    assert parsers.read_logind({"texts": {"/a": "KillUserProcesses=yes\n", "/b": " KillUserProcesses = no\n"}}) is False


def test_reserved_ports_are_read_as_ranges():
    texts = {
        "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "/proc/sys/net/ipv4/ip_local_reserved_ports": "8080,60000-60031\n",
    }
    assert parsers.read_port_ranges({"texts": texts}) == ((32768, 60999), ((8080, 8080), (60000, 60031)))
    assert parsers.read_port_ranges({"texts": {}}) is None


def test_an_answer_that_is_an_error_is_unknown_and_one_that_came_too_late_is_named():
    results = {
        "limits": {"error": "x", "late": False},
        "disk": {"error": "no answer in time", "late": True},
        "environ": ran(code=None, timed_out=True),
    }
    said = read_results(results)
    assert "limits" not in said and "disk" not in said and said["environ"] is None
    assert late_probes(results) == ("disk", "environ")


KEYS = "out code texts disks folders sizes taken limits names tests error /a peer port at 1".split()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 70000) | st.text(max_size=20),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(KEYS), some, max_size=5),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*[probe.name for probe in PROBES], "connection-tests"]), JSON, max_size=8))
def test_no_answer_of_a_node_can_make_the_head_fall_over(results):
    report = NodeReport("n", "/r", "n", "b", None, "u", "/py", "3.9", "5", "x", 1, None, None, None, {})
    facts = read_facts(report, results)
    assert facts.host == "n"


def test_only_what_fits_the_wish_is_asked():
    def names(**request):
        return {item["name"] for item in survey_items(SurveyRequest("n", **request))}

    assert "torch" in names() and "torch" not in names(is_full=False)
    assert "torch" in names(is_full=False, names=("torch", "limits"))
    assert not {"python", "torch"} & names(python=None)
    assert "paths" not in names() and "paths" in names(paths=("/data",))
    assert "sshd" in names() and "sshd" not in names(engine="local"), "no sshd carries its connections"
    assert len([item["name"] for item in survey_items(SurveyRequest("n"))]) == len(names())


# --- who reaches whom ---


def test_few_hosts_try_every_pair_and_many_try_a_sample_in_which_nobody_is_left_out():
    few = [f"n{number}" for number in range(ALL_PAIRS_UP_TO)]
    assert len(choose_pairs(few)) == ALL_PAIRS_UP_TO * (ALL_PAIRS_UP_TO - 1)
    for count in (ALL_PAIRS_UP_TO + 1, 10, 256):
        many = [f"n{number}" for number in range(count)]
        pairs = choose_pairs(many)
        assert len(pairs) <= count * 5 and all(one != other for one, other in pairs)
        assert {one for one, _ in pairs} == {other for _, other in pairs} == set(many)
        assert {one for one, other in pairs if other == "n0"} == set(many[1:])
        assert choose_pairs(many) == pairs


def test_ports_are_those_that_are_free_everywhere():
    assert choose_ports((20001, 20002, 20003), (), [[20001], [20002]]) == (20003,)
    assert choose_ports((20001,), (61024, 61056, 61088), [[61055], []]) == (20001, 61056)
    assert choose_ports((20001,), (61024,), [[20001], [61024]]) == ()


def report_of(host, routes):
    return NodeReport(host, "/r", host, "b", None, "u", "/py", "3.9", "5", "x", 1, None, None, None, routes)


def test_a_peer_is_tried_at_the_address_that_it_uses_itself_and_never_at_a_loopback():
    reports = {
        "a": report_of("a", {"b": Route("eth0", "10.0.0.1")}),
        "b": report_of("b", {"a": Route("eth0", "10.0.0.2")}),
    }
    plan = plan_connection_tests(reports, (20001,))
    assert [(one.peer, one.address) for one in plan.targets["a"]] == [("b", "10.0.0.2")]
    assert plan.expected == {"a": ("b",), "b": ("a",)}
    here = {name: report_of(name, {}) for name in ("a", "b")}
    assert plan_connection_tests(here, (20001,)) is None


# --- what is shown ---


def test_a_secret_is_never_shown_but_equal_ones_are_seen_to_be_equal():
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "GITHUB_AUTH"):
        shown = mask(name, "hunter2", salt="a")
        assert "hunter2" not in shown and shown == mask(name, "hunter2", salt="a") != mask(name, "other", salt="a")
        assert shown != mask(name, "hunter2", salt="b")
    assert mask("http_proxy", "http://me:hunter2@proxy:3128/", salt="a").endswith("@proxy:3128/")
    assert "hunter2" not in mask("http_proxy", "http://me:hunter2@proxy:3128/", salt="a")
    for name in ("PATH", "PWD", "KEYBOARD", "MONKEY", "RANK", "TOKENIZERS"):
        assert name == "TOKENIZERS" or mask(name, "plain", salt="a") == "plain"


def test_variables_are_folded_and_a_diff_leaves_out_what_cannot_be_the_same():
    facts = {
        "n1": NodeFacts("n1", environ={"A": "1", "B": "x", "HOSTNAME": "n1"}),
        "n2": NodeFacts("n2", environ={"A": "1", "HOSTNAME": "n2"}),
        "n3": NodeFacts("n3"),
    }
    rows = {row.name: row.groups for row in make_env_report(CheckContext(facts=facts), salt="s").rows}
    assert [(one.value, one.hosts) for one in rows["A"]] == [("1", ("n1", "n2"))]
    assert [(one.value, one.hosts) for one in rows["B"]] == [("x", ("n1",)), (None, ("n2",))]
    differing = make_env_report(CheckContext(facts=facts), salt="s", only_differing=True)
    assert [row.name for row in differing.rows] == ["B"]


def test_what_lies_in_ascendruns_own_folder_is_no_difference_where_hosts_have_it_in_different_places():
    facts = {
        host: NodeFacts(
            host,
            root=root,
            environ={
                "PYTHONPATH": f"{root}/trees/ab:/opt/own",
                "DATA": f"/data/{host}",
                "ASCENDRUN_CHECKPOINT_DIR": f"{root}/runs/r/checkpoints",
            },
        )
        for host, root in (("n1", "/state/n1/.ascendrun"), ("n2", "/state/n2/.ascendrun"))
    }
    rows = {row.name: row.groups for row in make_env_report(CheckContext(facts=facts), salt="s").rows}
    assert [group.value for group in rows["PYTHONPATH"]] == ["<ascendrun>/trees/ab:/opt/own"]
    assert [row.name for row in make_env_report(CheckContext(facts=facts), salt="s", only_differing=True).rows] == [
        "DATA"
    ]
    alone = make_env_report(CheckContext(facts={"n1": facts["n1"]}), salt="s").rows
    assert {row.groups[0].value for row in alone} >= {"/state/n1/.ascendrun/trees/ab:/opt/own"}


def test_an_env_file_needs_a_plan():
    try:
        write_env_file(CheckContext(facts={"n1": NodeFacts("n1")}), "n1")
    except LookupError:
        return
    raise AssertionError("there is no plan to write")


def test_the_table_shows_the_majority_first_then_outliers_then_who_is_not_known():
    facts = {f"n{number}": NodeFacts(f"n{number}", kernel="5.10") for number in range(4)}
    facts["n7"] = NodeFacts("n7", kernel="4.19", python=PythonFacts(version="3.9.1"))
    facts["n8"] = NodeFacts("n8")
    rows = {
        row.name: [(group.value, len(group.hosts)) for group in row.groups]
        for row in fact_rows(CheckContext(facts=facts))
    }
    assert rows["kernel"] == [("5.10", 4), ("4.19", 1), (None, 1)]
    assert rows["python"] == [("3.9.1", 1), (None, 5)]
    assert "torch" not in rows


GPUS = """@@ gpus
index, pci.bus_id
0, 00000000:3B:00.0
1, 00000000:86:00.0

@@= 0
@@ apps
gpu_bus_id, pid, used_gpu_memory [MiB]
00000000:86:00.0, 4242, 512 MiB
00000000:86:00.0, 4243, [N/A]
00000000:3B:00.0, 4244, 30 MiB
00000000:3B:00.0, 4245, 9000 MiB

@@= 0
@@ owners
4242\talice\t\tpython notebook.py
4244\troot\t\tnvidia-cuda-mps-server
4245\tbob\thead-j-7.2\tpython train.py

@@= 0
"""


def test_processes_on_gpus_are_read_with_their_owners_and_those_of_attempts_are_not_foreign():
    found = read_results({"gpu-processes": {"out": GPUS}})["gpu-processes"]
    assert [(one.pid, one.device, one.memory_mb, one.is_foreign) for one in found] == [
        (4242, 1, 512, True),
        (4243, 1, None, True),
        (4244, 0, 30, False),
        (4245, 0, 9000, False),
    ]
    assert found[0].owner is not None and found[0].owner.user == "alice" and found[1].owner is None


@pytest.mark.parametrize("out", ["", "@@ none\n\n@@= 0\n", GPUS.partition("@@ apps")[0], GPUS.replace("pid", "x")])
def test_without_an_answer_of_nvidia_smi_the_processes_on_gpus_are_unknown(out):
    assert read_results({"gpu-processes": {"out": out}}).get("gpu-processes") is None


def test_the_script_asks_nvidia_smi_and_names_the_owner_of_each_process(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n*index*) printf 'index, pci.bus_id\\n0, 00000000:3B:00.0\\n';;\n"
        f"*) printf 'gpu_bus_id, pid, used_gpu_memory [MiB]\\n00000000:3B:00.0, {os.getpid()}, 5 MiB\\n"
        "00000000:3B:00.0, 4194303, 5 MiB\\n';;\nesac\n"
    )
    tool.chmod(0o755)

    def ask(**more):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **more}
        done = subprocess.run(["sh", "-c", GPU_SCRIPT], env=env, stdout=subprocess.PIPE, text=True, check=True)
        return read_results({"gpu-processes": {"out": done.stdout}}).get("gpu-processes")

    mine, gone = ask()
    assert (mine.pid, mine.device, gone.pid, gone.owner) == (os.getpid(), 0, 4194303, None)
    assert mine.owner is not None and "python" in mine.owner.command
    assert ask(ASCENDRUN_SIM_ROOT=str(tmp_path)) is None, "a simulated node has no GPUs of this machine"


def test_locks_of_torch_extensions_are_listed_with_whether_a_process_holds_them(tmp_path):
    paths = [tmp_path / "torch_extensions" / part / "lock" for part in ("py310_cpu/left", "held", "a/b/too-deep")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (1, 1))
    with open(paths[1], "rb"):
        for env in ({"XDG_CACHE_HOME": str(tmp_path)}, {"TORCH_EXTENSIONS_DIR": str(tmp_path / "torch_extensions")}):
            done = subprocess.run([sys.executable, "-c", scripts.VERSIONS, "cpu"], capture_output=True, env=env)
            python = parsers.read_python(ran(done.stdout.decode()))
            assert set(python.locks) == {str(paths[0]), str(paths[1])} and python.locks[str(paths[1])] is None
            assert python.locks[str(paths[0])] > 1e9
    assert python.version and python.modules is not None and parsers.read_python(ran('{"locks": 3}')).locks == {}


def test_versions_of_packages_are_those_of_their_metadata_and_the_first_on_the_path_counts(tmp_path):
    planted = {
        "first/torch-2.1.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nVersion: 2.1.0+cpu\n\nVersion: 9\n",
        "second/torch-2.2.0.dist-info/METADATA": "Version: 2.2.0\n",
        "second/torch_npu-2.1.0.post3.dist-info/METADATA": "Version: 2.1.0.post3\n",
        "second/deepspeed-0.14-py3.9.egg-info": "Version: 0.14\n",
        "second/ray.egg-info/PKG-INFO": "Version: 2.9\n",
        "second/peft-1.0.dist-info/RECORD": "",
    }
    for name, text in planted.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {"PYTHONPATH": f"{tmp_path / 'first'}:{tmp_path / 'second'}:{tmp_path / 'missing'}"}
    done = subprocess.run([sys.executable, "-S", "-c", scripts.VERSIONS, "cpu"], capture_output=True, env=env)
    found = {
        name: version for name, version in parsers.read_python(ran(done.stdout.decode())).modules.items() if version
    }
    assert found == {"torch": "2.1.0+cpu", "torch-npu": "2.1.0.post3", "deepspeed": "0.14", "ray": "2.9"}
    done = subprocess.run([sys.executable, "-c", scripts.VERSIONS, "cpu"], capture_output=True)
    modules = parsers.read_python(ran(done.stdout.decode())).modules
    known = {one.metadata["Name"].lower().replace("_", "-"): one.version for one in metadata.distributions()}
    assert modules == {name: known.get(name) for name in scripts.MODULES}
