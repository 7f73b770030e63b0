"""Each check over small worlds: what it finds, on which hosts, with which words; and what it leaves in peace."""

import json
import re
from dataclasses import fields
from functools import cache
from string import Formatter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.findings import Finding, Severity, fold_findings
from ascendrun.core.jobfile.spec import parse_stages
from ascendrun.core.reports import Route
from ascendrun.health.checks import CHECKS, NPU_CHECKS, choose_checks, run_checks
from ascendrun.health.comparison import finding_line
from ascendrun.health.survey import facts
from ascendrun.health.survey.check_context import CheckContext, compare
from ascendrun.text import LANGUAGES, PSEUDO, from_json, to_json, translations
from tests.lib.host_worlds import GIB, JOB, NAMES, found, sound, with_driver, world
from tests.unit.health.checks.test_planted_faults import FAULTS, OF_THE_ANSWERS, cluster

# By severity and code of the finding that must name it: what is planted on n2. What a survey brings is planted in its
# raw answers: checks/test_planted_faults.py.
PLANTED = {
    Severity.NOTE: {
        "login-slow": {"login_s": 4.0},
        "machine-id-shared": {"machine_id": "machine-1"},
        "python-patch-differs": {"python": facts.PythonFacts(version="3.10.2")},
        "variable-differs": {"environ": {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/opt/old"}},
    },
    Severity.WARN: {
        "uid-differs": {"uid": 1001},
        "kill-user-processes": {"kills_user_processes": True, "user": "me", "uid": 1000},
        "shm-full": {"disks": {"/dev/shm": facts.Disk("/dev/shm", 1 << 20, 700 * GIB)}},
        "several-interfaces": {"routes": {"n1": Route("eth0", "10.0.0.2"), "n3": Route("eth1", "10.1.0.2")}},
        "python-slow": {"python": facts.PythonFacts(setup="failed", error="killed after 8 s"), "late": ("python",)},
        "build-lock-left": {
            "python": facts.PythonFacts(
                version="3.10.13", locks={"/c/op/lock": 601.0, "/c/new/lock": 9.0, "/c/x/lock": None}
            )
        },
        "package-differs": {
            "python": facts.PythonFacts(version="3.10.13", modules={"torch": "2.3.1", "numpy": "1.26.4"})
        },
        "torch-slow": {"torch": facts.TorchFacts(torch="2.1.0", import_s=45.0)},
        "threads-wrong": {"environ": {"OMP_NUM_THREADS": "all"}},
    },
    Severity.FAIL: {
        "peer-wrong": {
            "connection_tests": (facts.ConnectionTest("n3", "10.0.0.3", 20001, "n9 answered", "wrong-host"),)
        },
        "peer-fails": {"connection_tests": (facts.ConnectionTest("n3", "10.0.0.3", 20001, "no route", "failed"),)},
        "setup-failed": {"python": facts.PythonFacts(setup="failed", error="set_env.sh: No such file")},
        "python-broken": {"python": facts.PythonFacts(error="libpython3.10.so: cannot open")},
    },
}
NPU_PLANTED = {
    Severity.WARN: {
        "variable-conflict": {"environ": {"HCCL_CONNECT_TIMEOUT": "3000"}},
        "allocator-setting-new": {
            "npu": with_driver("22.0.4"),
            "environ": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
        },
    },
    Severity.FAIL: {"if-ip-elsewhere": {"environ": {"HCCL_IF_IP": "127.0.0.1"}}},
    Severity.NOTE: {
        "devices-missing": {"torch": facts.TorchFacts(devices=0)},
        "backend-missing": {"torch": facts.TorchFacts(devices=8, backend="hccl", has_backend=False)},
    },
}


def test_sound_nodes_of_every_family_have_no_finding():
    for family in ("cpu", "npu", "cuda", None):
        assert run_checks(world(family=family)) == ()


def rows_of(table):
    return [(code, changes, severity) for severity, of_code in table.items() for code, changes in of_code.items()]


def planted(table):
    rows = rows_of(table)
    return pytest.mark.parametrize(("code", "changes", "severity"), rows, ids=[code for code, _, _ in rows])


@planted(PLANTED)
def test_a_fault_of_one_node_is_found_and_the_node_is_named(code, changes, severity):
    (one,) = found(world(sound("n2", **changes)), code)
    assert one.severity is severity
    assert "n2" in one.hosts and (one.hosts == ("n2",) or code == "machine-id-shared")


@planted(NPU_PLANTED)
def test_a_fault_that_matters_to_npus_is_found_there_only(code, changes, severity):
    (one,) = found(world(sound("n2", **changes), family="npu"), code)
    assert (one.severity, one.hosts) == (severity, ("n2",))
    if code not in ("if-ip-elsewhere", "backend-missing"):
        assert not found(world(sound("n2", **changes), family="cpu"), code)


def test_required_checks_run_in_the_gate_and_skipped_ones_do_not():
    light = {check.name for check in choose_checks(is_full=False)}
    assert "torch" not in light and "clock" in light
    chosen = {check.name for check in choose_checks(is_full=False, skip=["clock", "one_interface"], require=["torch"])}
    assert chosen == (light | {"torch"}) - {"clock", "one-interface"}


# --- whatever the facts, no check falls over ---


def test_nothing_known_finds_nothing():
    unknown = {name: facts.NodeFacts(name) for name in NAMES}
    for family in ("npu", "cuda", "cpu", None):
        assert run_checks(CheckContext(facts=unknown, device_type=family)) == ()
    assert run_checks(CheckContext(facts={})) == ()


@cache
def planted_values() -> dict[str, list]:
    """Values of faulty nodes by the name of the fact: those planted here, and those of raw answers."""
    rows = [changes for _, changes, _ in [*rows_of(PLANTED), *rows_of(NPU_PLANTED)]]
    answers = {f"n{number}": plant for number, (_, plant) in enumerate(OF_THE_ANSWERS, start=1)}
    rows += [vars(node) for node in cluster([None] * len(answers), answers).facts.values()]
    values: dict[str, list] = {}
    for row in rows:
        for name, value in row.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return values


def mixtures():
    """Nodes of which each fact is missing, sound, or one of the planted faults."""
    names = [field.name for field in fields(facts.NodeFacts) if field.name not in ("host", "npu", "late")]

    def node(host):
        well, faulty = sound(host), planted_values()
        choices = {name: st.sampled_from([None, getattr(well, name), *faulty.get(name, [])]) for name in names}
        return st.fixed_dictionaries(choices).map(lambda values: facts.NodeFacts(host=host, **values))

    return st.tuples(*[node(name) for name in NAMES])


@settings(max_examples=150, deadline=None)
@given(st.deferred(mixtures), st.sampled_from(["npu", "cuda", "cpu", None]), st.booleans())
def test_no_check_raises_and_every_finding_renders_in_every_language(nodes, family, has_job):
    spec = parse_stages(f"name: j\n{JOB % 'cpu'}", "job.yaml", programs={})[0].spec if has_job else None
    one = CheckContext(facts={node.host: node for node in nodes}, device_type=family, job=spec)
    codes = {code for check in CHECKS for code in check.codes}
    for finding in run_checks(one):
        assert finding.code in codes
        assert placeholders(words_of(finding.code)) <= set(finding.values), finding
        assert from_json(json.loads(json.dumps(to_json(finding.values)))).keys() == finding.values.keys()
        for lang in (*LANGUAGES, PSEUDO):
            assert finding_line(finding).render(lang)


def test_a_check_that_falls_over_is_told_and_hides_nothing():
    odd = sound("n2", limits={"NOFILE": ("many", "more")}, kernel="4.19")
    codes = {finding.code: finding for finding in run_checks(world(odd))}
    assert codes["check-error"].values["check"] == "limits" and "TypeError" in codes["check-error"].values["why"]
    assert "kernel-differs" in codes


# --- texts ---


def placeholders(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def words_of(code: str) -> str:
    """The English message and hint of a finding's code. Raises KeyError without a message."""
    rows = translations("en")
    return rows[f"finding.{code}.message"] + rows.get(f"finding.{code}.hint", "")


def test_a_fix_uses_only_what_its_finding_names():
    for key, command in translations("en").items():
        if key.startswith("finding.") and key.endswith(".fix"):
            code = key.split(".")[1]
            assert placeholders(command) <= placeholders(re.sub(r":[a-z]+\}", "}", words_of(code))), code


def test_a_fix_quotes_values_and_lists_ids():
    switch = Finding("device-tls-differs", Severity.FAIL, ("n1",), {"devices": (0, 3), "switch": 1})
    assert switch.fix == "for i in 0 3; do hccn_tool -i $i -tls -s enable 1; done"
    package = Finding("package-differs", Severity.WARN, ("n1",), {"package": "a b", "majority": "1;2"})
    assert package.fix == "python3 -m pip install 'a b'=='1;2'"


def test_every_code_of_a_check_has_a_message():
    for check in CHECKS:
        assert check.codes and all(words_of(code) for code in check.codes), check.name
        assert check.name == check.name.lower() and "_" not in check.name
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_every_code_of_the_hosts_checks_is_planted_here():
    codes = {code for check in CHECKS if check not in NPU_CHECKS for code in check.codes}
    elsewhere = {
        "unreachable", "auth-failed", "host-key-unknown", "host-key-changed", "no-python", "limit-locked",
        "same-machine", "port-taken", "port-ephemeral", "torch-import", "torch-missing", "home-shared", "device-leased",
        "gpu-busy", "checkpoints-local", "output-relative", "ray-missing", "engine-tracking", "engine-kill-wait",
        "engine-devices-unknown", "engine-devices-differ", "engine-state-remote", "engine-time-refused",
        "engine-time-short", "power-agent",
    }  # fmt: skip
    planted = {code for code, _, _ in [*rows_of(PLANTED), *rows_of(NPU_PLANTED)]} | {code for code, _ in FAULTS}
    assert codes - elsewhere <= planted


# --- folding ---


def test_findings_that_differ_only_in_their_hosts_become_one_and_the_worst_come_first():
    note, fail = Severity.NOTE, Severity.FAIL
    folded = fold_findings(
        [
            Finding("a", note, ("n1",), {"x": "1"}),
            Finding("b", fail, ("n1",)),
            Finding("a", note, ("n2",), {"x": "1"}),
            Finding("a", note, ("n3",), {"x": "2"}),
        ]
    )
    assert [(one.code, one.hosts) for one in folded] == [("b", ("n1",)), ("a", ("n1", "n2")), ("a", ("n3",))]


def test_who_could_not_be_asked_is_neither_majority_nor_outlier():
    same = compare({"a": "1", "b": None, "c": "2", "d": "2"})
    assert (same.majority, same.majority_hosts, same.others) == ("2", ("c", "d"), (("1", ("a",)),))
    assert compare({"a": None}) is None
    assert [text.values for text in same.evidence()] == [
        {"value": "2", "hosts": ("c", "d")},
        {"value": "1", "hosts": ("a",)},
    ]
