"""Where a failure lies, also without the catalogue: codes, classes of exceptions and kernel events give it too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ablation import TABLES as ABLATED
from ablation import rows, score, share_of_rows, without_vocabulary
from corpus import FOLDER, Builder, Case, case_files, case_of, load

from ascendrun.ascend.signatures import signatures
from ascendrun.ascend.vocabularies import DOMAINS, at_phase, class_of, deepest, value_of, values_in, vocabulary
from ascendrun.core.jobs.restart import Kind
from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render
from ascendrun.health.diagnosis.render import class_text
from ascendrun.health.failures import failure_of, fingerprint_of

CASES = [load(path) for path in case_files()]
TABLES = sorted(path.stem for path in (Path(__file__).parents[2] / "ascendrun/ascend/vocabularies").glob("*.toml"))
for name in ("wordings", "groups", "waits", "hints", "package_pairs", "wait_limits"):  # no values
    TABLES.remove(name)


def test_every_case_has_its_domain_and_scope() -> None:
    found = score(CASES, lambda case: case_of(FOLDER / f"{case.name}.yaml")[1])
    assert (found.domain, found.scope, found.wrong) == (1.0, 1.0, ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "seed", "least"), [(0.5, 1, 0.95), pytest.param(0.5, 2, 0.95, marks=pytest.mark.thorough), (0.0, 1, 0.93)]
)
def test_domains_are_right_with_half_of_the_rows_and_with_none(share: float, seed: int, least: float) -> None:
    with share_of_rows(share, seed):
        found = score(CASES)
    assert found.domain >= least and found.rank >= 0.96
    assert not found.wrong, "wrong and certain"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if not number % 3 else pytest.param(name, marks=pytest.mark.thorough) for number, name in enumerate(ABLATED)],
)
def test_a_vocabulary_is_not_needed_by_all_without_the_rows(name: str) -> None:
    """Every third case, without the catalogue and this vocabulary: what is left is enough for nine of ten."""
    with share_of_rows(0.0, seed=1), without_vocabulary(name):
        found = score(CASES[::3])
    assert found.domain >= 0.88 and not found.wrong


@pytest.mark.slow
def test_domains_are_right_without_the_family_of_their_rows() -> None:
    """The cases of one family of rows, without that family."""
    families = {row.code: row.family for row in signatures()}
    by_family: dict[str, list[Case]] = {}
    for case in CASES:
        by_family.setdefault(families.get(case.expected.codes[0], ""), []).append(case)
    right = total = 0
    for family, cases in by_family.items():
        own = [case for case in cases if case.expected.domain]
        if family and own:
            with rows(lambda row, family=family: row.family != family):  # type: ignore[misc]
                right += round(score(own).domain * len(own))
            total += len(own)
    assert right >= 0.8 * total


@pytest.mark.parametrize("name", TABLES)
def test_a_vocabulary_names_known_domains(name: str) -> None:
    assert {one.domain for one in vocabulary(name).values()} <= set(DOMAINS)
    assert {one.retry for one in vocabulary(name).values()} <= {"", "same", "exclude", "never", "unknown"}


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("RuntimeError: aclnnAdd failed, error code is 161002", "program"),
        ("HCCL function error: HcclCommInitRootInfo(), error code is 7", "resource"),
        (
            "HCCL function error: hcclCommInitRootInfoConfig(n, &root, rank, &(comm->hcclComm_)), error code is 11",
            "network",
        ),
        ("AllGatherRunner:0 HcclCommInitRootInfo fail, error:2, rank:1", "device-memory"),
        ("[Init][Nic]errNo[0x000000000500000b] rdma init failed", "network"),
        ("init.cc:9 NCCL WARN Mismatched collective detected; invalid usage", "collectives"),
        ("ncclInternalError: Internal check failed. Last error: Cuda failure 2 'out of memory'", "device-memory"),
        ("OSError: libx.so.1: cannot open shared object file: No such file or directory", "environment"),
        ("AssertionError: Error in memory profiling. Initial free memory 60 GiB", "device-memory"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/1'", "storage"),
        ("rust: Os { code: 24, message: Too many open files (os error 24) }", "resource"),
        ("curl: (6) Could not resolve host: models.local", "network"),
        ("rtMalloc failed, drvRetCode=6, ret = 207001", "device-memory"),
        ("ProcessExitedException: process 3 terminated with signal SIGKILL", "outside"),
        ("aclrtSynchronizeStream failed, error code is 507899, retCode=0x25; EL0004: no memory", "device-memory"),
        ("HcclAllreduce, error code is 4; Resource_Error_Insufficient_Device_Memory(EI0011)", "device-memory"),
        ("[ERROR] HCCL(9,python):2026-11-20 [a.cc:27] [9][InitChannelStage][VersionConflict]differs", "environment"),
        ("n1:4:5 [0] transport/net_ib.cc:90 NCCL WARN the queue is gone; unhandled cuda error", "network"),
        ("n1:4:5 [0] transport/p2p.cc:90 NCCL WARN the handle is gone; unhandled system error", "device"),
        ("n1:4:5 [0] graph/xml.cc:90 NCCL WARN no path to the card; internal error - please report", "environment"),
        ("n1:4:5 [0] graph/xml.cc:90 NCCL WARN Duplicate GPU detected", "program"),
        ("n1:4:5 [0] NCCL INFO graph/xml.cc:90 -> 2; n1:4:5 [0] misc/socket.cc:9 NCCL WARN gone", "network"),
    ],
)
def test_the_deepest_code_of_a_message_gives_its_domain(text: str, domain: str) -> None:
    found = deepest(values_in(text))
    assert found is not None and found.domain == domain


def test_the_file_of_a_warning_of_nccl_is_never_a_proof() -> None:
    (found,) = values_in("n1:4:5 [0] proxy.cc:90 NCCL WARN the operation did not end")
    assert found.domain == "network" and not found.is_exact


@pytest.mark.parametrize(
    ("name", "domain"),
    [
        ("ModuleNotFoundError", "environment"),
        ("ConnectionRefusedError", "network"),
        ("torch.OutOfMemoryError", "device-memory"),
        ("my.shards.ShardError", "program"),
        ("store.client.GetTimeout", "silent"),
        ("mylib.CredentialsMissing", "access"),
    ],
)
def test_a_class_has_the_domain_of_its_nearest_known_base(name: str, domain: str) -> None:
    assert class_of(name).domain == domain


@pytest.mark.parametrize(
    ("file", "message", "domain"),
    [
        ("site-packages/h5py/_hl/dataset.py", "OSError: Can't read data (inflate() failed)", "data"),
        ("site-packages/datasets/table.py", "datasets.table.CastError: column names do not match", "data"),
        ("lib/python3.11/getpass.py", "KeyError: 'getpwuid(): uid not found: 10007'", "environment"),
        ("site-packages/oss2/api.py", "oss2.exceptions.NoSuchKey: {'status': 404}", "access"),
        ("lib/python3.11/multiprocessing/synchronize.py", "OSError: [Errno 28] No space left on device", "resource"),
        (
            "lib/python3.11/subprocess.py",
            "FileNotFoundError: [Errno 2] No such file or directory: 'git'",
            "environment",
        ),
        ("site-packages/torch/nn/functional.py", "RuntimeError: shapes cannot be multiplied", "program"),
        ("site-packages/mmdet/__init__.py", "AssertionError: MMCV==2.2.0 is used", "environment"),
    ],
)
def test_the_library_that_raised_gives_the_domain_of_a_general_class(file: str, message: str, domain: str) -> None:
    name = {"subprocess.py": "_execute_child", "__init__.py": "<module>"}.get(file.rpartition("/")[2], "call")
    frames = (
        f'  File "/job/run.py", line 3, in <module>\n    main()\n  File "/opt/{file}", line 9, in {name}\n    work()\n'
    )
    groups = [{"ranks": 1, "at": 60, "exit": 1, "err": f"Traceback (most recent call last):\n{frames}{message}"}]
    found = diagnose(Builder({"ranks": 4, "groups": groups}, seed="library").evidence())
    assert found.ranks == (1,) and found.domain == domain
    assert domain == "program" or found.reason_grade is not Confidence.CERTAIN


def test_a_path_that_is_not_there_while_files_are_saved_is_of_the_storage() -> None:
    missing = value_of("errnos", "ENOENT")
    assert missing is not None
    assert [at_phase(missing, phase).domain for phase in ("save", "launch", "step")] == [
        "storage",
        "environment",
        "program",
    ]


def test_a_failed_look_up_of_a_name_in_a_collective_is_of_its_own_rank() -> None:
    place = "/opt/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py"
    err = (
        f'Traceback (most recent call last):\n  File "{place}", line 155, in _create_tcp_store\n    store = TCPStore(\n'
    )
    groups = [
        {"ranks": "1,3", "at": 4, "exit": 1, "err": f"{err}ValueError: host not found: Name or service not known"},
        {"ranks": "0,2", "at": 6, "exit": -15, "stopped": True},
    ]
    found = diagnose(Builder({"ranks": 4, "per_host": 1, "groups": groups}, seed="names").evidence())
    assert (found.ranks, found.domain, found.scope) == ((1, 3), "network", "ranks")


def test_the_longest_range_of_a_code_counts() -> None:
    found = [value_of("acl", code) for code in ("507999", "507015", "999999")]
    assert [one and (one.domain, one.proof) for one in found] == [("device", "hint"), ("program", "usual"), None]


@pytest.mark.parametrize(
    ("name", "kind", "retry"),
    [
        ("a_module_is_missing_on_one_host", Kind.INFRA, "exclude"),
        ("nccl_may_lock_no_memory_on_one_node", Kind.INFRA, "exclude"),
        ("the_masters_address_is_not_in_the_environment", Kind.USER, "never"),
        ("npu_out_of_memory", Kind.OOM, "never"),
        ("sdma_error_on_one_device", Kind.DEVICE, "unknown"),
        ("a_copy_on_the_device_has_an_address_that_is_not_mapped", Kind.DEVICE, "unknown"),
    ],
)
def test_what_fails_on_one_host_only_is_started_again_without_it(name: str, kind: Kind, retry: str) -> None:
    """It was filed under the user, and the host was used again."""
    case = next(case for case in CASES if case.name == name)
    found = failure_of(diagnose(case.evidence), case.evidence)
    assert (found.kind, found.retry) == (kind, retry)


def test_one_exception_of_two_attempts_has_one_fingerprint() -> None:
    """Paths, numbers and ranks differ between attempts; another exception has another one, and a wait has none."""
    last = "ValueError: shard /data/{} of run {} has no header"
    texts = [last.format("a1", 7), last.format("b2", 9), "ValueError: two axes for one plan"]
    groups = [
        {
            "ranks": rank,
            "at": 60,
            "exit": 1,
            "err": f'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\n    g()\n{text}',
        }
        for rank, text in enumerate(texts)
    ]
    rows = [{"ranks": 4, "groups": [group]} for group in groups]
    prints = [fingerprint_of(diagnose(Builder(row, seed="print").evidence())) for row in rows]
    assert prints[0] == prints[1] != prints[2] and "" not in prints
    silent = next(case for case in CASES if case.expected.domain == "silent")
    assert fingerprint_of(diagnose(silent.evidence)) == ""


WORKER = "(WorkerProcess pid=7) ERROR 09-03 12:08:10 worker.py:226] "
FRAMES = (
    '  File "/job/serve.py", line 17, in divide\n    check(heads, ranks)\n  File "/job/serve.py", line 10, in check\n'
)
COMMAND = "subprocess.CalledProcessError: Command '['cc', 'a.c']' returned non-zero exit status 1."
NCCL = "socket.h:403 NCCL WARN Connect to 10.0.0.9 failed : Network is unreachable\nRuntimeError: no"
INLINE = (
    'Traceback (most recent call last):\n  File "<string>", line 9, in <module>\n'
    '  File "/e/site-packages/x/y.py", line 1, in f\n'
)


@pytest.mark.parametrize(
    ("err", "domain", "where"),
    [
        (
            "\n".join(WORKER + line for line in f"{FRAMES}AssertionError: 25 by 4".splitlines()),
            "program",
            "serve.py:10",
        ),
        (f"/tmp/a.c:4:10: fatal error: Python.h: No such file or directory\n{COMMAND}", "environment", None),
        (f"{INLINE}KeyError: 'w'", "program", "<string>:9"),
        (
            "socket.h:403 NCCL WARN Connect to 10.0.0.9 failed : Network is unreachable\nRuntimeError: no",
            "network",
            None,
        ),
    ],
    ids=["each line behind a logger's prefix", "a compiler's error", "a program of python -c", "a warning of NCCL"],
)
def test_what_is_around_an_exception_is_read(err: str, domain: str, where: str | None) -> None:
    case = {"ranks": 4, "groups": [{"ranks": "all", "err": err, "exit": 1}]}
    found = diagnose(Builder(case, seed="around").evidence())
    assert (found.domain, found.values.get("where", where)) == (domain, where or found.values.get("where"))
    assert where is None or found.code == "exception"


def test_one_rank_that_fails_alone_is_no_host_also_if_it_is_alone_there() -> None:
    groups = [{"ranks": 1, "err": f"{INLINE}KeyError: 'w'", "exit": 1}, {"ranks": "rest", "exit": -15, "stopped": True}]
    found = diagnose(Builder({"ranks": 2, "per_host": 1, "groups": groups}, seed="one").evidence())
    assert (found.ranks, found.scope) == ((1,), "rank")


@pytest.mark.parametrize(
    ("err", "rest", "scope"),
    [
        ("TypeError: no such option", {}, "alike"),
        ("ImportError: libx.so.2: cannot open shared object file", {}, "alike"),
        ("TypeError: no such option", {"out": "at work"}, "rank"),
        ("TypeError: no such option", {"exit": 0, "stopped": False}, "rank"),
        ("TypeError: no such option", {"exit": 1, "stopped": False, "out": "at work"}, "alike"),
        ("OSError: [Errno 28] No space left on device: '/data/a'", {}, "shown"),
        ("RuntimeError: a tensor is on npu:4", {}, "shown"),
    ],
    ids=["code", "software", "others have output", "others succeeded", "others ended too", "storage", "a device"],
)
def test_a_scope_of_one_rank_needs_another_that_did_not_fail_so(err: str, rest: dict[str, object], scope: str) -> None:
    """One rank was named as the scope because no other one had output."""
    first = {"ranks": 1, "at": 60, "err": f"{INLINE}{err}", "exit": 1}
    others = {"ranks": "rest", "at": 60.1, "exit": -15, "stopped": True, **rest}
    found = diagnose(Builder({"ranks": 4, "steps": 0, "groups": [first, others]}, seed="scope").evidence())
    assert (found.ranks, found.scope) == ((1,), scope)
    mark = str(class_text(found, "  [likely]").render("en"))
    assert mark.endswith("[likely]") == (scope == "rank")


@pytest.mark.parametrize(
    ("message", "helps"),
    [
        ("AssertionError: 25 is not divisible by 4", "choose sizes that divide"),
        ("ValueError: remaining_argv: ['--use_x']", "remove or rename the option"),
        ("RuntimeError: Actual DeviceType is: cpu", "on the device of the rank"),
        ("RuntimeError: Failed to find function HcclNew", "source its set_env.sh"),
        ("RuntimeError: Unsupported Soc Version: Ascend310P3", "the build for this chip"),
        ("mylib.QueueError: Name or service not known", "getent hosts"),
        ("RuntimeError: HcclCommInitRootInfo failed. | Error Number 2", "HCCL_BUFFSIZE"),
        ("RuntimeError: Check failed: 27((n)) <= 16((m)) buffer overflow; raise RECV_MAX", "(`RECV_MAX`)"),
        ("AssertionError: Shape: 2304 out of considered ranges: [(1, 2048)]", "what it requires (`2304`)"),
        ("RuntimeError: request 3 failed: tokens=9, max_seq_len=8", "(`max_seq_len`)"),
    ],
)
def test_the_hint_helps_with_what_the_message_is_about(message: str, helps: str) -> None:
    err = f'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\n    g()\n{message}'
    groups = [{"ranks": "all", "at": 60, "exit": 1, "err": err}]
    found = diagnose(Builder({"ranks": 4, "groups": groups}, seed="helps").evidence())
    assert helps in render(found, "en").hint and render(found, "zh").hint.isascii() is False


def test_an_end_without_a_traceback_has_the_hint_of_its_domain() -> None:
    groups = [{"ranks": 1, "at": 60, "exit": 1, "err": "[ERROR] cannot bind: Address already in use"}]
    found = diagnose(Builder({"ranks": 4, "groups": groups}, seed="end").evidence())
    assert (found.domain, "ss -ltnp" in render(found, "en").hint) == ("resource", True)


@pytest.mark.parametrize(("code", "domain"), [(247, "host-memory"), (137, "host-memory"), (255, "program")])
def test_a_launchers_exit_code_names_the_signal_of_its_child(code: int, domain: str) -> None:
    row = {"ranks": 2, "groups": [{"ranks": 0, "at": 60, "exit": code}], "hosts": {"npu01": {"memory_free": 1e9}}}
    row["hosts"]["npu01"]["memory_total"] = 5e11
    assert diagnose(Builder(row, seed="code").evidence()).domain == domain


@pytest.mark.parametrize("killed", [False, True])
def test_who_reports_that_ray_ended_a_worker_for_memory_is_not_first(killed: bool) -> None:
    told = "(raylet) 1 worker(s) were killed due to the node running low on memory."
    groups = [{"ranks": 0, "at": 61, "exit": 1, "err": told}, *[{"ranks": 2, "at": 60, "exit": -9}] * killed]
    row = {"ranks": 4, "groups": groups, "hosts": {"npu01": {"memory_free": 1e9, "memory_total": 5e11}}}
    found = diagnose(Builder(row, seed="ray").evidence())
    assert (found.ranks, found.domain) == ((2,) if killed else (0,), "host-memory")


FRAME = 'Traceback (most recent call last):\n  File "/job/a.py", line 3, in f\n    g()\n'
CACHE = '  File "/opt/site-packages/triton/runtime/cache.py", line 117, in get_group\n    json.load(f)\n'
ELASTIC = (
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: {code}) local_rank: 0 (pid: 178) of binary"
)


def found_of(err: str, exit_code: int = 1, **row: object) -> Diagnosis:
    """The diagnosis of a job whose rank 1 of 8 prints this, and the others are stopped; or as `row` has it."""
    groups = [{"ranks": 1, "at": 60, "exit": exit_code, "err": err}, {"ranks": "rest", "exit": -15, "stopped": True}]
    return diagnose(Builder({"ranks": 8, "groups": groups, **row}, seed="found").evidence())


@pytest.mark.parametrize(("code", "expected"), [(-9, ("killed", "outside")), (-11, ("crash", "program"))])
def test_a_launchers_line_about_a_process_is_the_end_of_its_rank(code: int, expected: tuple[str, str]) -> None:
    raised = f"{FRAME}torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    groups = [{"ranks": 0, "at": 60, "exit": 1, "err": f"{ELASTIC.format(code=code)}\n{raised}"}]
    found = found_of("", ranks=1, launcher="torchrun", groups=groups)
    assert ((found.code, found.domain), found.ranks, found.scope) == (expected, (0,), "all")


@pytest.mark.parametrize(
    ("err", "code", "domain", "helps"),
    [
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=9.0", -9, "host-memory", "data workers"),
        (
            "include/socket.h:344 WARN Socket creation failed : Address family not supported by protocol\n"
            "terminate called after throwing an instance of 'std::runtime_error'\n"
            "  what():  ncclCommInitRank failed: unhandled system error",
            -6,
            "network",
            "NCCL_SOCKET_IFNAME",
        ),
        (f"{FRAME}{CACHE}OSError: [Errno 116] Stale file handle", 1, "storage", "TRITON_CACHE_DIR"),
        (f"{FRAME}PermissionError: [Errno 13] Permission denied: '/.cache'", 1, "storage", "XDG_CACHE_HOME"),
        (
            f"{FRAME.replace('in f', 'in load_checkpoint')}torch.OutOfMemoryError: CUDA out of memory.",
            1,
            "device-memory",
            "map_location",
        ),
        (
            f"{FRAME}torch.distributed.DistBackendError: NCCL error, unhandled cuda error\nLast error:\n"
            "Cuda failure 802 'system not yet initialized'",
            1,
            "environment",
            "fabricmanager",
        ),
    ],
    ids=["Slurm", "an old NCCL", "a cache in the frames", "a cache in the message", "a checkpoint", "a fabric"],
)
def test_the_lines_around_an_end_decide_domain_and_fix(err: str, code: int, domain: str, helps: str) -> None:
    found = found_of(err, code)
    assert found.ranks == (1,)
    assert (found.domain, helps in render(found, "en").hint) == (domain, True), render(found, "en")


def test_the_message_has_the_kernel_that_failed_and_what_cann_reports() -> None:
    kernel = "[ERROR] RUNTIME(9,python):2026-11-20 Aicore kernel execute failed, fault kernel_name=alloc_18, hash=1"
    row = {"ranks": 1, "at": 60, "exit": 1, "plog": kernel, "err": "RuntimeError: sync failed, error code:507035"}
    shown = render(found_of("", family="npu", groups=[row]), "en").message
    assert "alloc_18" in shown and "?" not in shown
    told = "Communication_Error_Bind_IP_Port(EI0019): Failed to listen. The port 50001 has already been bound."
    assert "50001" in render(found_of(told, family="npu"), "en").message


def test_the_one_rank_that_was_not_stopped_is_first_also_without_a_reason() -> None:
    known = "[ERROR] 2026-11-20-10:00:00 (PID:9, Device:1, RankID:1) ERR02200 DIST call hccl api failed."
    found = found_of(known, family="npu")
    assert (found.ranks, found.code, found.confidence) == ((1,), "exit-code", Confidence.LIKELY)


def test_an_error_of_one_host_is_not_certain_if_the_clocks_do_not_tell_whether_others_passed() -> None:
    err = f"{FRAME}SyntaxError: invalid syntax"
    groups = [{"ranks": "0-3", "at": 2, "exit": 1, "err": err}]
    groups.append({"ranks": "rest", "at": 9, "exit": -15, "stopped": True})
    told, untold = (found_of("", per_host=4, groups=groups, clocks=clocks) for clocks in ("known", "unknown"))
    assert (told.domain, told.reason_grade) == ("environment", Confidence.LIKELY)
    assert (untold.domain, untold.reason_grade) == ("program", Confidence.LIKELY)


@pytest.mark.parametrize(
    ("ranks", "message", "helps"),
    [
        ("0-3", "IndexError: list index out of range", "LOCAL_RANK"),
        ("0-3", "RuntimeError: CUDA error: unknown error", "--deep"),
        ("all", "datasets.exceptions.DatasetGenerationError: no column text", "names of columns"),
        ("all", "ValueError: Must flatten tensors with uniform dtype but got two", "to one data type"),
        ("all", "pip._vendor.pkg_resources.ContextualVersionConflict: (numpy 2.2.4, {'tool'})", "belong together"),
    ],
)
def test_the_hint_follows_from_domain_and_scope(ranks: str, message: str, helps: str) -> None:
    groups = [{"ranks": ranks, "at": 60, "exit": 1, "err": f"{FRAME}{message}"}]
    groups += [{"ranks": "rest", "at": 60.2, "exit": -15, "stopped": True}] * (ranks != "all")
    assert helps in render(found_of("", per_host=4, groups=groups), "en").hint


def test_a_general_error_of_nccl_has_the_reason_that_it_reports() -> None:
    message = "torch.distributed.DistBackendError: NCCL error in: a.cpp:52, unhandled system error, NCCL version 2.21.5"
    found = found_of(f"{FRAME}{message}\nLast error:\nring 4 of the plug-in has no buffer", family="cuda")
    assert "ring 4 of the plug-in has no buffer" in render(found, "en").message
