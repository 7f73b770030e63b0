"""What the frames of a traceback say whose end is not in the log: the call that failed, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_what_helps import SITE, explain

HEAD = "Traceback (most recent call last):\n"
OWN = '  File "/job/train.py", line 21, in main\n    run(config)\n'


def frame(file: str, name: str, code: str, line: int = 9) -> str:
    return f'  File "{file}", line {line}, in {name}\n    {code}\n'


@pytest.mark.parametrize("head", [HEAD, ""])
@pytest.mark.parametrize(
    ("last", "domain", "fix"),
    [
        (frame(f"{SITE}/keeplib/disk.py", "restore", "with _open_part(f, 'rb') as part:"), "program", "the traceback"),
        (frame(f"{SITE}/keeplib/disk.py", "restore", "with open(f, 'rb') as part:"), "storage", "that all nodes share"),
        (frame(f"{SITE}/keeplib/disk.py", "restore", "torch.load(part)"), "storage", "that all nodes share"),
        (
            frame("/opt/env/lib/python3.11/shutil.py", "rmtree", "onerror(os.rmdir, path)"),
            "storage",
            "deleted it first",
        ),
        (frame(f"{SITE}/keeplib/disk.py", "keep", "os.makedirs(where)"), "storage", "one rank creates"),
        (frame(f"{SITE}/asklib/web.py", "ask", "r.raise_for_status()"), "access", "let one rank ask"),
        (frame(f"{SITE}/asklib/web.py", "ask", "raise _made(HfHubHTTPError, text) from e"), "access", "curl -sSI"),
        (frame("/job/ask.py", "ask", "raise GatedRepoError(text)"), "access", "token"),
        (frame(f"{SITE}/keeplib/tables.py", "read", "return json.loads(text)"), "data", "the traceback"),
    ],
)
def test_the_last_call_that_is_there_gives_the_class(head: str, last: str, domain: str, fix: str) -> None:
    found = explain(f"{head}{OWN}{last}")
    assert (found.code, found.domain) == ("exit-code", domain)
    assert found.reason_grade.value in ("likely", "unknown") and found.confidence.value == "likely"
    assert fix in found.hint


def test_a_traceback_that_is_cut_in_the_import_of_a_library_is_of_the_environment() -> None:
    frames = frame(f"{SITE}/fastlib/__init__.py", "<module>", "import fastlib.core")
    frames += frame(f"{SITE}/fastlib/core.py", "_load", "check_output(command)")
    found = explain(
        HEAD
        + frame("/job/train.py", "<module>", "import fastlib")
        + frames
        + frame("/opt/env/lib/python3.11/subprocess.py", "check_output", "run(command,")
    )
    assert found.domain == "environment" and "`fastlib` may have a defect" in found.hint
    run = frame(f"{SITE}/torch/distributed/run.py", "<module>", "main()")
    assert explain(f'{HEAD}  File "<frozen runpy>", line 198, in _run_code\n{run}').domain == "program"
    own = explain(HEAD + frame("/job/train.py", "<module>", "main()") + frame("/job/fit.py", "fit", "x()"))
    assert own.domain == "program"


def test_a_call_far_above_the_last_frame_is_not_the_one_that_failed() -> None:
    found = explain(
        HEAD + frame("/job/train.py", "main", "with open(name) as part:") + frame("/job/fit.py", "fit", "x()")
    )
    assert found.domain == "program" and found.reason_grade.value == "unknown"


def test_where_a_traceback_is_cut_is_named() -> None:
    found = explain(HEAD + OWN + frame("/job/fit.py", "fit", "model.step(batch)", 88))
    assert "the traceback of rank `0` ends at `fit.py:88 in fit: model.step(batch)`" in found.hint
    assert found.phase == "step"


def test_a_cut_traceback_of_another_rank_is_named_if_the_first_has_no_output() -> None:
    groups = [
        {"ranks": "0", "at": 60, "exit": 1},
        {"ranks": "1", "at": 60.1, "exit": 1, "err": HEAD + OWN},
        {"ranks": "rest", "at": 61, "exit": -15, "stopped": True},
    ]
    assert "the traceback of rank `1` ends at `train.py:21 in main: run(config)`" in explain("", groups=groups).hint


def test_a_whole_traceback_is_not_called_cut() -> None:
    found = explain(f"{HEAD}{OWN}RuntimeError: it failed for 3 reasons")
    assert "the traceback of rank" not in found.hint


@pytest.mark.parametrize("process", ["", "(Worker rank=3 pid=85) ", "(Worker pid=85) "])
def test_a_cut_traceback_behind_the_prefixes_of_a_process_and_a_logger_is_no_last_error(process: str) -> None:
    logged = "failed: restarts\n" + HEAD + OWN + frame("/job/fit.py", "fit", "model.step(batch)", 88)
    found = explain("".join(f"{process}ERROR 01-23 02:09:10 [pool.py:546] {line}\n" for line in logged.splitlines()))
    assert "ends at `fit.py:88 in fit: model.step(batch)`" in found.hint
    assert found.code == "error-line" and found.values["last"].endswith("failed: restarts")
