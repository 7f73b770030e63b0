"""Reasons that are easily taken for others: return codes below others, library errors, signals, CANN's own packages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import FOLDER, Builder, load

from ascendrun.ascend.vocabularies import DOMAINS, value_of
from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render
from ascendrun.health.diagnosis.classes import retry_of

STOPPED = {"ranks": "rest", "at": 90.5, "err": "sigterm", "exit": -15, "stopped": True}


def explain(first: dict[str, Any], **row: Any) -> Diagnosis:
    """The diagnosis of a job in which rank 2 fails so, and the others are stopped."""
    groups = [{"ranks": 2, "at": 90, "exit": 1, **first}, STOPPED]
    return diagnose(Builder({"ranks": 4, "family": "npu", "groups": groups, **row}, seed="certainty").evidence())


def raised(message: str) -> dict[str, Any]:
    head = 'Traceback (most recent call last):\n  File "/work/train.py", line 70, in <module>\n    step()\n'
    return {"err": f"{head}RuntimeError: {message}"}


INNER = "EE9999: [PID: 4] 2026-11-20-10:01:30.100.200 Stream synchronize failed, stream=0x7f11, retCode=0x91"
PLOG = "[ERROR] RUNTIME(4,python):2026-11-20-10:01:30.100.200 [stream.cc:12] "


@pytest.mark.parametrize("code", ["507001", "107002", "507899"])
@pytest.mark.parametrize("place", ["exception", "line", "plog"])
def test_a_return_code_with_another_one_below_it_is_not_certain(code: str, place: str) -> None:
    outer = f"aclrtSynchronizeStream failed, error code is {code}"
    made = {
        "exception": (raised(outer), raised(f"{outer}\n{INNER}")),
        "line": ({"err": outer}, {"err": f"{outer}\n{INNER}"}),
        "plog": ({"plog": PLOG + outer}, {"plog": f"{PLOG}{outer}\n{PLOG}{INNER}"}),
    }
    alone, below = (explain(first) for first in made[place])
    assert (alone.code, alone.confidence) == (f"ACL-{code}", Confidence.CERTAIN)
    assert (below.code, below.confidence, below.ranks) == (f"ACL-{code}", Confidence.LIKELY, (2,))


DURING = "During handling of the above exception, another exception occurred:"
WHOLE = raised("sample 17 has no label")["err"]


@pytest.mark.parametrize(
    ("output", "is_certain"),
    [
        (WHOLE, True),
        (WHOLE.partition("\n")[2], False),
        (f"{WHOLE.replace('RuntimeError: ', '')}\n{WHOLE}", False),
        (f"{WHOLE}\n\n{DURING}", False),
        (f"{DURING}\n\n{WHOLE}", False),
        (WHOLE.replace("    step()\n", "    step()\n    raise RuntimeError(text)\n"), False),
    ],
    ids=["whole", "without its head", "after one without its exception", "one more", "one before", "without a frame"],
)
def test_an_exception_is_certain_only_if_every_traceback_is_whole(output, is_certain):
    found = explain({"err": output})
    assert found.ranks == (2,) and (found.confidence is Confidence.CERTAIN) == is_certain, (found.code, found.caveats)


def test_a_general_exception_is_certain_only_if_its_message_names_something() -> None:
    found = explain(raised("dictionary changed size during iteration"))
    assert (found.code, found.ranks, found.confidence) == ("exception", (2,), Confidence.LIKELY)


NO_LABEL = WHOLE.replace("RuntimeError", "ValueError")
SHUTDOWN = (
    "terminate called without an active exception\nFatal Python error: Aborted\n\nThread 0x01 (most recent call first):"
)


@pytest.mark.parametrize(("head", "is_certain"), [(NO_LABEL, True), (NO_LABEL.replace("<module>", "save"), False)])
def test_an_abort_at_shutdown_is_no_other_reason_once_the_program_was_left(head: str, is_certain: bool) -> None:
    found = explain({"err": f"{head}\n{SHUTDOWN}\n  <no Python frame>", "exit": -6})
    assert (found.code, found.ranks) == ("exception", (2,))
    assert (found.confidence is Confidence.CERTAIN) == is_certain, found.caveats


@pytest.mark.parametrize(
    ("message", "has_waited"),
    [
        ("NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, invalid usage, NCCL version 2.21.5", False),
        ("NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, unhandled cuda error", False),
        ("[ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64", False),
        ("HCCL function error: HcclGetRootInfo(&id), error code is 4", False),
        ("HCCL function error: HcclCommInitRootInfo(), error code is 7", False),
        ("HCCL function error: HcclAllReduce(buffer), error code is 9", True),
        ("NCCL error: timed out after 600 s", True),
        ("NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, remote process exited", True),
    ],
)
def test_an_error_of_the_library_is_a_wait_only_with_a_timeout(message: str, has_waited: bool) -> None:
    """Seen from another rank's failure: whether this one's end is shown as a wait."""
    groups = [
        {"ranks": 0, "at": 60, "exit": 1, **raised("sample 17 has no label")},
        {"ranks": 1, "at": 61, "exit": 1, **raised(message)},
    ]
    found = diagnose(Builder({"ranks": 2, "groups": groups}, seed="certainty").evidence())
    codes = {link.code for link in found.chain if 1 in link.ranks}
    assert any(code.startswith("waited-") for code in codes) is has_waited, found.chain


@pytest.mark.parametrize(("number", "name"), [(15, "SIGTERM"), (1, "SIGHUP")])
@pytest.mark.parametrize("form", ["Received Signals.{name} death signal", "Received {number} death signal"])
def test_a_signal_to_torchrun_that_ascendrun_did_not_send_is_named(number: int, name: str, form: str) -> None:
    warning = "W1120 18:01:30.100000 9200 torch/distributed/elastic/agent/server/api.py:741] "
    text = (
        f"{warning}{form.format(number=number, name=name)}, shutting down workers\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/env/bin/torchrun", line 8, in <module>\n'
        "    sys.exit(main())\n"
        "torch.distributed.elastic.multiprocessing.api.SignalException: "
        f"Process 9200 got signal: {number}"
    )
    found = explain({"err": text}, launcher="torchrun", per_host=1)
    assert (found.code, found.ranks, found.values["signal"]) == ("terminated", (2,), name)


@pytest.mark.parametrize("code", ["E40020", "EC0010"])
@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("tbe", "cann-python-path"),
        ("'tbe.common.platform'", "cann-python-path"),
        ("te", "cann-python-path"),
        ("'te.platform'", "cann-python-path"),
        ("'topi'", "cann-python-path"),
        ("decorator", "E40020"),
        ("'tensorflow'", "E40020"),
    ],
)
def test_a_package_of_cann_is_not_for_pip(code: str, module: str, expected: str) -> None:
    failed = f"{code}: [PID: 3] 2026-11-20-10:00:20.100.200 Failed to import Python module [ModuleNotFoundError: "
    found = explain(raised(f"Initialize: error code is 500001\n{failed}No module named {module}.]."))
    assert found.code == expected
    hint = render(found, "en").hint
    assert ("set_env.sh" in hint) is (expected == "cann-python-path")
    assert hint.startswith("pip install") is (expected == "E40020")


@pytest.mark.parametrize("before", ["\n", "\n\n\n"])
def test_a_message_may_begin_with_empty_lines(before: str) -> None:
    assert (
        explain(raised(f"{before}sample 17 has no label")).values["message"] == "RuntimeError: sample 17 has no label"
    )


def test_one_error_of_hosts_with_different_run_directories_is_one_reason() -> None:
    told = {"at": 90, "exit": 1, "spread": 0.1}
    errs = [raised(f"/{one}/shard: none in run {one}")["err"] for one in ("run-81f2", "run-19ce")]
    groups = [{"ranks": f"{2 * k}-{2 * k + 1}", **told, "err": err} for k, err in enumerate(errs)]
    found = diagnose(Builder({"ranks": 4, "per_host": 2, "groups": groups}, seed="folds").evidence())
    assert (found.ranks, found.scope) == ((0, 1, 2, 3), "all")


def test_ranks_that_raise_the_same_after_the_stop_of_their_host_are_first_too() -> None:
    told = raised("--hiden_size: no such option")["err"]
    err = "".join(f"[rank{{rank}}]: {line}\n" for line in told.splitlines())
    case = {"ranks": 8, "launcher": "torchrun", "groups": [{"ranks": "all", "spread": 0.3, "err": err, "exit": 1}]}
    found = diagnose(Builder(case, seed="spread").evidence())
    assert (found.ranks, found.scope) == (tuple(range(8)), "all")


def test_the_class_that_an_exception_wraps_decides() -> None:
    found = explain(raised("SafeTensorError::MetadataIncompleteBuffer"))
    assert found.domain == "data"


def test_a_program_on_the_command_line_is_no_library_that_cannot_be_imported() -> None:
    err = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nValueError: no such layer'
    case = {"ranks": 4, "per_host": 2, "groups": [{"ranks": "all", "err": err, "exit": 1}]}
    assert diagnose(Builder(case, seed="c").evidence()).domain == "program"


def test_ranks_with_nothing_but_a_code_that_hides_others_are_named() -> None:
    err = (
        "[rank{rank}]: RuntimeError: EZ9999: Inner Error!\n[rank{rank}]: EZ9999: heads / kv heads = 5 is no case here\n"
    )
    case = {"ranks": 2, "groups": [{"ranks": "all", "spread": 0.2, "err": err, "exit": 1}]}
    found = diagnose(Builder(case, seed="hidden").evidence())
    assert (found.ranks, found.code, found.confidence.value) == ((0, 1), "EZ9999", "likely")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_an_unknown_exception_is_shown_whole(lang: str) -> None:
    message = "the shards were written with another stride; " * 20 + "set data.readers to a divisor of 16"
    found = explain({"err": raised(message)["err"].replace("RuntimeError", "ShardLayoutError")})
    assert found.code == "exception" and message in render(found, lang).message


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("the cache holds 3 blocks. Increase `memory_share`, or decrease `max_len` when the engine starts.",
         "Increase `memory_share`, or decrease `max_len` when the engine starts"),
        ("two plans for one axis; set plan.axis to 0", "set plan.axis to 0"),
        ("an axis is used twice", None),
        ("bad axis. Please report this to the authors.", None),
    ],
)  # fmt: skip
def test_the_hint_has_what_the_message_advises(message: str, advice: str | None) -> None:
    found = explain(raised(message))
    assert found.values.get("advice") == advice
    assert advice is None or advice in render(found, "en").hint


def test_a_failure_of_one_host_shows_what_only_this_host_has() -> None:
    packages = [{"torch": "2.5.1", "torch_npu": version} for version in ("2.5.1", "2.5.1.dev", "2.5.1")]
    hosts = {f"npu0{k + 1}": {"facts": {"driver": "24.1", "packages": one}} for k, one in enumerate(packages)}
    text = raised("symbol table of libtorch_npu.so: undefined symbol: _ZN3c10")["err"]
    groups = [{"ranks": "2-3", "at": 20, "spread": 0.1, "err": text, "exit": 1}, STOPPED]
    row = {"ranks": 6, "per_host": 2, "family": "npu", "groups": groups, "hosts": hosts}
    found = diagnose(Builder(row, seed="differs").evidence())
    assert (found.domain, found.scope, found.hosts) == ("environment", "host", ("npu02",))
    shown = [proof.text.values for proof in found.evidence if proof.line == "diagnosis.differs"]
    assert shown == [{"host": "npu02", "key": "packages.torch_npu", "own": "2.5.1.dev", "others": "2.5.1"}]
    labels = dict(enumerate(("a/0", "a/1", "b/0", "b/1", "c/0", "c/1")))  # no other host does the work of npu02
    alone = diagnose(replace(Builder(row, seed="differs").evidence(), labels=labels))
    assert not [proof for proof in alone.evidence if proof.line == "diagnosis.differs"]


CALLED = 'Traceback (most recent call last):\n  File "/work/train.py", line 70, in <module>\n    step()\n'
RAISED = CALLED.replace("step()", "step(rows[key], layer.weight)")


@pytest.mark.parametrize(
    ("last", "is_certain"),
    [
        ("codec.BitstreamError: <exception str() failed>", False),
        ("meter.MeterError_NotReadable: Not Readable", False),
        ("RuntimeError: 17", False),
        ("meter.MeterError_NotReadable: no counter for this board", True),
        ("MemoryError", True),
        ("KeyError: 3", True),
    ],
)
def test_an_exception_without_a_message_is_certain_only_by_an_exact_class(last: str, is_certain: bool) -> None:
    found = explain({"err": f"{RAISED}{last}"})
    assert (found.ranks, found.confidence is Confidence.CERTAIN) == ((2,), is_certain), (found.why, found.caveats)


@pytest.mark.parametrize(
    ("code", "last", "is_whole"),
    [
        ("rows[key]", "KeyError: 3", True),
        ("prepare(model)", "KeyError: 3", False),
        ("raise KeyError(key)", "KeyError: 3", True),
        ("_run(x)", "AttributeError: 'X' object has no attribute 'index'", False),
        ("x.index", "AttributeError: 'X' object has no attribute 'index'", True),
        ("getattr(x, name)", "AttributeError: 'X' object has no attribute 'index'", True),
        ("main()", "NameError: name 'wrap' is not defined", False),
        ("wrap(model)", "NameError: name 'wrap' is not defined. Did you mean: 'warp'?", True),
        ("main()", "ValueError: no such layer", True),
    ],
)
def test_a_line_of_code_that_cannot_raise_its_exception_lacks_the_frames_below(
    code: str, last: str, is_whole: bool
) -> None:
    found = explain({"err": f"{CALLED.replace('step()', code)}{last}"})
    assert (found.confidence is Confidence.CERTAIN) == is_whole
    assert is_whole or [str(one) for one in found.caveats] == ["part of a traceback is missing"]


def test_the_statement_that_raised_stands_for_a_message() -> None:
    head = CALLED.replace("step()", "assert heads % ranks == 0")
    assert explain({"err": f"{head}AssertionError"}).values["message"] == "AssertionError: assert heads % ranks == 0"


def test_a_code_of_any_failed_copy_is_no_proof_of_a_fault_of_the_device() -> None:
    found = diagnose(load(FOLDER / "a_copy_on_the_device_has_an_address_that_is_not_mapped.yaml").evidence)
    assert (found.domain, found.reason_grade, found.retry) == ("device", Confidence.LIKELY, "unknown")
    assert "drain" not in render(found).hint


@pytest.mark.parametrize(
    ("text", "domain", "is_proven"),
    [
        # what happened is proven, and not by whom: a port of the job itself, ranks that a launcher placed, a defect
        ("Communication_Error_Bind_IP_Port(EJ0003): Failed to bind the IP port.", "resource", False),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", "program", False),
        ("ImportError: /opt/io.so: undefined symbol: _ZN8io_queue4pushEv", "environment", False),
        ("dcmi module initialize failed. ret is -8005", "environment", False),
        # what any program, library or data may raise
        ("AttributeError: 'ParallelLinear' object has no attribute 'weight'", "program", False),
        ("KeyError: 'label'", "program", False),
        # an operator that failed on the device: by its input, by a defect, or by the device
        ("RuntimeError: aclrtSynchronizeStream(stream), error code is 507035", "program", False),
        ("RuntimeError: aclrtSynchronizeStream(stream), error code is 507013", "device", False),
        ("RuntimeError: aclrtSynchronizeStream(stream), error code is 507054", "device", True),
        ("OSError: [Errno 122] Disk quota exceeded: '/data/a.pt'", "storage", True),
        ("torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB", "device-memory", True),
        ("ModuleNotFoundError: No module named 'torch_npu'", "environment", True),
        ("zlib.error: Error -3 while decompressing data: incorrect header check", "data", True),
    ],
)
def test_a_class_is_certain_only_by_a_value_that_failures_of_no_other_domain_have(
    text: str, domain: str, is_proven: bool
) -> None:
    found = explain({"err": f"{RAISED}{text}" if "rror: " in text else text})
    assert (found.domain, found.reason_grade is Confidence.CERTAIN) == (domain, is_proven)
    assert found.confidence is Confidence.CERTAIN  # which rank was first, and what it printed


def test_a_value_proves_no_more_where_it_is_known_by_less_than_itself() -> None:
    exact, ranged = (value_of("acl", code) for code in ("245000", "507054"))
    assert exact is not None and ranged is not None
    assert (exact.proof, ranged.proof, ranged.as_hint.proof) == ("hint", "hard", "hint")
    outer = value_of("acl", "507001")
    assert outer is not None and outer.as_hint.proof == "outer"


@pytest.mark.parametrize("domain", DOMAINS)
def test_what_its_domain_causes_again_is_never_said_to_pass_by_a_retry(domain: str) -> None:
    again = domain in ("program", "data", "environment", "collectives", "host-memory", "device-memory")
    stays = again or domain in ("device", "resource")
    assert {retry_of(code, domain=domain) for code in ("crash", "host-oom", "killed")} == {
        "unknown" if stays else "same"
    }
    assert retry_of("EI0019", domain=domain) == ("unknown" if again else "same"), "a process that ends soon holds it"
    whole = retry_of("crash", domain=domain, is_whole=True)
    of_the_host = domain in ("environment", "device", "resource")
    assert whole == ("exclude" if of_the_host else "unknown" if again else "same")


FULL = f"{CALLED}OSError: [Errno 28] No space left on device: '/data/a.pt'\n"


@pytest.mark.parametrize(
    ("err", "is_certain"),
    [
        (FULL, True),
        (f"{CALLED}ValueError: no such layer\n{FULL}", False),
        (f"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.96 GiB total)\n{FULL}", False),
    ],
)
def test_the_class_of_a_node_is_certain_although_its_rank_is_not_known(err: str, is_certain: bool) -> None:
    case = {"ranks": 2, "launcher": "torchrun", "groups": [{"ranks": 0, "at": 60, "err": err, "exit": 1}]}
    case["groups"] += [{"ranks": 1, "at": 61, "exit": -15, "stopped": True}]
    found = diagnose(Builder(case, seed="node").evidence())
    assert (found.domain, found.confidence.value) == ("storage", "likely")
    assert (found.reason_grade is Confidence.CERTAIN) == is_certain
