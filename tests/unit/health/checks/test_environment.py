"""Checks of what ranks get: variables, interpreter, torch."""

import json
import subprocess

import pytest

from ascendrun.core.findings import Severity
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.health.checks import run_checks
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import PythonFacts, TorchFacts
from ascendrun.options import ProgramOptions
from tests.lib.host_worlds import JOB, NAMES, found, sound, with_driver, world


@pytest.mark.parametrize(
    ("driver", "setting", "needs"),
    [
        ("22.0.4", "expandable_segments:True", "driver 23.0.0"),
        ("23.0.0", "expandable_segments:True", None),
        ("22.0.4", "expandable_segments:False", None),
        ("25.0.RC1", "max_split_size_mb:512, pin_memory_expandable_segments:True", "driver 25.5.0, CANN 8.5.0"),
        (None, "expandable_segments:True", None),
    ],
)
def test_an_allocator_setting_that_the_driver_does_not_have_yet_is_told(driver, setting, needs):
    node = sound("n2", npu=with_driver(driver), environ={"PYTORCH_NPU_ALLOC_CONF": setting})
    told = [
        ", ".join(map(str, one.values["required"])) for one in found(world(node, family="npu"), "allocator-setting-new")
    ]
    assert told == ([needs] if needs else [])


def test_the_bundled_programs_lie_in_a_folder_of_each_nodes_own():
    def node(host, tree):
        return sound(host, root=f"/home/{host}/.ascendrun", environ={"PYTHONPATH": f"/home/{host}/.ascendrun/{tree}"})

    assert not found(world(*[node(name, "trees/ab") for name in NAMES]), "variable-differs")
    (one,) = found(world(node("n1", "trees/ab"), node("n2", "old"), node("n3", "trees/ab")), "variable-differs")
    assert one.hosts == ("n2",)


def test_a_timeout_below_hccls_own_that_ascendrun_sets_itself_is_no_conflict():
    assert run_checks(world(family="npu", job=JOB % "npu"), is_full=False) == ()


def test_torch_that_cannot_be_imported_stops_a_job_but_is_a_note_in_a_plain_login():
    broken = sound("n2", torch=TorchFacts(step="import torch_npu", error="ImportError: libhccl.so: cannot open"))
    assert found(world(broken), "torch-import")[0].severity is Severity.NOTE
    assert found(world(broken, job=JOB % "cpu"), "torch-import")[0].severity is Severity.FAIL
    assert not found(world(broken, job=JOB % "cpu"), "torch-import", is_full=False), "it takes too long for a gate"
    old = sound(
        "n2", torch=TorchFacts(error="libc.so.6: version `GLIBC_2.34' not found (required by libascend_hal.so)")
    )
    (one,) = found(world(old, job=JOB % "cpu"), "glibc-too-old")
    assert one.values == {"version": "GLIBC_2.34", "file": "libascend_hal.so"}
    assert not found(world(old, job=JOB % "cpu"), "torch-import")


def test_fewer_devices_than_the_job_takes_are_told():
    job = "command: [python3, train.py]\ndevices: {type: npu, per_node: 8}\n"
    (one,) = found(world(sound("n2", torch=TorchFacts(devices=7)), family="npu", job=job), "devices-missing")
    assert one.severity is Severity.FAIL and (one.values["found"], one.values["expected"]) == (7, 8)


def test_a_program_of_ours_needs_torch():
    spec = parse_stages("name: j\nprogram: p\n", "job.yaml", programs={"p": ProgramOptions("p", {})})[0].spec
    facts = {"n1": sound("n1"), "n2": sound("n2", python=PythonFacts(version="3.10.13", modules={"torch": None}))}
    (one,) = found(CheckContext(facts=facts, job=spec), "torch-missing")
    assert one.severity is Severity.FAIL and one.hosts == ("n2",)


def test_a_ray_cluster_needs_one_version_of_ray_on_all_nodes():
    spec = parse_stages("name: j\ncommand: [python, a.py]\nlauncher: ray\n", "job.yaml", programs={})[0].spec
    for third, code in (("2.9.0", "package-differs"), (None, "ray-missing")):
        ray = {"n1": "2.60.0", "n2": "2.60.0", "n3": third}
        facts = {name: sound(name, python=PythonFacts(modules={"ray": version})) for name, version in ray.items()}
        (one,) = found(CheckContext(facts=facts, job=spec), code)
        assert one.severity is Severity.FAIL and one.hosts == ("n3",)


def test_a_lock_that_a_process_of_any_node_holds_is_of_a_running_build():
    left, held = PythonFacts(locks={"/home/me/op/lock": 5000.0}), PythonFacts(locks={"/home/me/op/lock": None})
    assert found(world(sound("n2", python=left)), "build-lock-left")
    assert not found(world(sound("n2", python=left), sound("n1", python=held)), "build-lock-left")


def test_the_shown_command_starts_the_interpreter_in_the_environment_of_the_job(tmp_path):
    setup = "export FROM_SETUP='it'\\''s'\n# sources set_env.sh\nexport AND=\"$FROM_ENV\\\\t\""
    python = tmp_path / "py"
    python.write_text('#!/bin/sh\nprintf "%s|" "$FROM_ENV" "$FROM_SETUP" "$AND" "$@"\n')
    python.chmod(0o755)
    job = f"command: [./x]\npython: {python}\nenv: {{FROM_ENV: 'a b'}}\nsetup: {json.dumps(setup)}\n"
    (one,) = found(world(sound("n2", python=PythonFacts(error="broken")), job=job), "python-broken")
    shown = subprocess.run(["bash", "-c", one.values["command"]], capture_output=True, check=True).stdout
    assert shown.decode() == "a b|it's|a b\\t|-c|print(1)|"
    (plain,) = found(world(sound("n2", python=PythonFacts(error="broken"))), "python-broken")
    assert plain.values["command"] == "python3 -c 'print(1)'"
