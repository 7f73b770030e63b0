"""The catalogue of known errors: each row knows its own lines and no others, and looking for all of them is cheap."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascendrun.ascend import signatures as catalogue
from ascendrun.ascend.signatures import KINDS, LINE_LIMIT, parse_pattern, scan, signature_of, signatures, strongest
from ascendrun.text import LANGUAGES, translations
from tests.lib.pages.failures import FAMILIES

ROWS = signatures()
CHINESE = re.compile(r"[\u4e00-\u9fff]")
PLACE = re.compile(r"\{([a-z_]+)\}")


def codes_of(text):
    return [hit.signature.code for hit in scan([(1, text)])]


# ---------------------------------------------------------------- the rows


def test_every_example_is_known_by_its_own_row_first_and_by_others_only_where_that_is_declared():
    wrong = []
    for row in ROWS:
        for example in row.examples:
            found = list(scan([(1, example)]))
            codes = [hit.signature.code for hit in found]
            ties = [hit for hit in found[1:] if hit.signature.strength == row.strength]
            if codes[:1] != [row.code] or set(codes[1:]) - set(row.also) or ties:
                wrong.append((row.code, codes, example))
    assert wrong == []


def test_no_row_takes_a_near_miss_for_an_error():
    wrong = [(row.code, codes_of(counter), counter) for row in ROWS for counter in row.counters if codes_of(counter)]
    assert wrong == []


def test_there_are_rows_for_every_layer_and_each_has_a_code_of_its_own():
    names = [row.code.lower() for row in ROWS]
    assert len(ROWS) >= 170
    assert [name for name in names if names.count(name) > 1] == []
    assert {row.family for row in ROWS} == set(FAMILIES)


def flaws_of(row):
    """What a row lacks, in words; nothing for a good one."""
    if row.role not in catalogue.ROLES or row.retry not in catalogue.RETRIES:
        yield "role or retry is no known word"
    limits = {"teardown": 10, "consequence": 49}
    if not 0 < row.strength <= limits.get(row.role, 100):
        yield f"strength {row.strength} does not fit a {row.role}"
    if not (row.patterns and row.examples and row.counters and row.source):
        yield "patterns, examples, counters or source is empty"
    if not all(signature_of(code) for code in row.also):
        yield "also names an unknown code"
    for lang in LANGUAGES:
        words = row.words(lang)
        texts = (words.message, words.cause, words.hint)
        if not all(text and len(text) <= 300 and not text.endswith((".", "。", " ")) for text in texts):
            yield f"{lang}: empty, too long, or with a full stop"
        if lang != "zh" and any(CHINESE.search(text) for text in texts):
            yield f"{lang}: Chinese"
        if lang == "zh" and not (CHINESE.search(words.message) and CHINESE.search(words.cause)):
            yield "zh: not Chinese"


def test_every_row_is_complete_in_both_languages():
    chinese = translations("zh")
    parts = [f"signature.{row.code}.{part}" for row in ROWS for part in ("message", "cause", "hint")]
    assert [key for key in parts if key not in chinese] == []
    assert sorted(key for key in chinese if key.startswith("signature.")) == sorted(parts)
    assert [(row.code, flaw) for row in ROWS for flaw in flaws_of(row)] == []


def test_a_row_names_in_words_only_what_every_pattern_of_it_finds():
    wrong = []
    for row in ROWS:
        english, key = row.english, f"signature.{row.code}"
        words = [english.message, english.cause, english.hint]
        words += [translations("zh")[f"{key}.{part}"] for part in ("message", "cause", "hint")]
        wanted = set(PLACE.findall(" ".join(words)))
        wrong += [(row.code, text) for text in row.patterns if not wanted <= set(parse_pattern(text).names)]
    assert wrong == []


# What may stand for each kind of value in a line made from a pattern.
SPECIMENS = {
    "": "word-1", "int": "42", "number": "1.5", "hex": "0x2f", "size": "1.50 GiB", "list": "1,3", "path": "/a/b",
    "name": "name_1", "bracketed": "[01],[02];", "hccl": "HCCL_BUFFSIZE", "inside": "a b", "rest": "a b",
    "acl": "507777",
}  # fmt: skip


def line_of(pattern):
    """A line as the pattern describes it."""

    def stand_in(place):
        kind = place[3] or ""
        return "" if place[1] else kind.lstrip("=").split("|")[0] if kind not in SPECIMENS else SPECIMENS[kind]

    return re.sub(r"\{(?:(\*)|([a-z_]*)(?::([^{}]+))?)\}", stand_in, pattern)


def test_every_pattern_matches_the_line_that_it_describes_and_the_search_finds_it():
    wrong = []
    for row in ROWS:
        for text in row.patterns:
            line = line_of(text)
            found = parse_pattern(text).compiled().search(line)
            if not found or not (row.is_general or row.code in codes_of(line)):
                wrong.append((row.code, text, line))
    assert wrong == []


def test_there_is_a_specimen_for_every_kind_of_value():
    assert set(SPECIMENS) == set(KINDS)


# ---------------------------------------------------------------- patterns


def test_a_pattern_does_not_match_inside_a_word_or_number():
    pattern = parse_pattern("error code is {code:=507015}").compiled()
    assert pattern.search("x: error code is 507015.")
    assert not pattern.search("error code is 5070151")
    assert not pattern.search("terror code is 507015")
    edges = parse_pattern("{code:=EI0006}:").compiled()
    assert edges.search("(x)EI0006: y") and not edges.search("XEI0006: y")


def test_two_spaces_in_a_pattern_stand_for_any_blanks():
    pattern = parse_pattern("|  {rank:int}  |  {status:=time out}  |").compiled()
    assert all(pattern.search(line)["rank"] == "7" for line in ("|7|time out|", "|   7 |  time out     |"))


@pytest.mark.parametrize(("text", "says"), [("{a} {b}", "no fixed text"), ("rank {a:digits}", "unknown kind of value")])
def test_a_pattern_that_cannot_be_searched_for_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse_pattern(text)


# ---------------------------------------------------------------- the search

OOM = "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 5; 60.97 GiB total capacity; 1 GiB free)"


def test_a_hit_brings_its_line_and_what_stood_in_it():
    (hit,) = scan([(7, "step 1"), (8, OOM), (9, "step 2")])
    assert (hit.line, hit.signature.code) == (8, "npu-out-of-memory")
    assert hit.values == {"size": "2.00 GiB", "device": "5"}
    assert "2.00 GiB" in hit.words("en").message
    assert "2.00 GiB" in hit.words("zh").message and hit.words("fr") == hit.words("en")


def test_hits_come_in_the_order_of_the_lines_and_of_one_line_the_strongest_first():
    line = "EZ9999: [PID: 7] Cannot find bin of op Arange, integral key 0/1/."
    hits = [(hit.line, hit.signature.code) for hit in scan([(1, line), (2, "fine"), (3, OOM)])]
    assert hits == [(1, "op-binary-missing"), (1, "EZ9999"), (3, "npu-out-of-memory")]


def test_a_general_row_is_told_only_where_nothing_more_exact_is_known():
    assert codes_of("RuntimeError: something nobody has heard of") == ["python-runtime"]
    assert codes_of("RuntimeError: Too many open files") == ["too-many-files"]


def test_the_strongest_hit_of_a_log_is_found_and_the_earliest_of_equals():
    lines = ["  exitcode  : -15 (pid: 4242)", OOM, "OSError: [Errno 104] Connection reset by peer", OOM]
    best = strongest(scan(enumerate(lines)))
    assert (best.signature.code, best.line) == ("npu-out-of-memory", 1)
    assert strongest([]) is None


def test_lines_on_both_sides_of_a_chunk_are_found():
    filler = "x" * 1000
    lines = [filler] * 400
    for index in (0, 255, 256, 262, 263, 399):
        lines[index] = OOM
    assert [hit.line for hit in scan(enumerate(lines))] == [0, 255, 256, 262, 263, 399]


@pytest.mark.parametrize(
    "line",
    [
        f"{OOM}{'y' * 10_000_000}",
        f"\x00\x00{OOM}\x00",
        f"训练失败 {OOM} \ufffd\ufffd",
        f"\x1b[31m[rank5]: {OOM}\x1b[0m\r",
        f"first\n{OOM}\nthird",
        f"{OOM} \udcff",
    ],
    ids=["10 MB", "NUL", "not ASCII", "colours", "line breaks", "surrogates"],
)
def test_odd_lines_are_searched_like_others(line):
    (hit,) = scan([(1, "before"), (2, line), (3, "after")])
    assert (hit.line, hit.signature.code) == (2, "npu-out-of-memory") and len(hit.text) <= LINE_LIMIT


def test_nothing_is_found_in_nothing_and_beyond_the_limit_of_a_line():
    assert list(scan([])) == [] and list(scan([(1, "")])) == []
    assert list(scan([(1, " " * LINE_LIMIT + OOM)])) == []


def test_a_code_is_described_in_both_languages_whatever_its_case():
    assert "HCCL_CONNECT_TIMEOUT" in signature_of("ei0006").words().message
    assert CHINESE.search(signature_of("EI0006").words("zh").hint)
    assert signature_of("EI4711") is None


@pytest.mark.parametrize(
    "text",
    [
        "error code is 507018",
        "Error code=507018, desc=",
        "ACL failed, error code:507018",
        "ErrCode=507018, desc:",
        "retCode=507018",
        "runtime result = 507018[FUNC:x]",
    ],
)
def test_every_way_of_writing_a_return_code_is_known(text):
    assert strongest(scan([(1, text)])).signature.code == "ACL-507018"


# ---------------------------------------------------------------- what real programs say

PROGRAMS = {
    "module-missing": "import no_such_module",
    "import-name-missing": "from json import no_such_name",
    "syntax-error": "exec('def f(:')",
    "file-missing": "open('/no/such/file')",
    "text-not-utf8": "b'\\xd6\\xd0'.decode()",
    "json-broken": "import json; json.loads('')",
    "disk-full": "file = open('/dev/full', 'w'); file.write('x'); file.flush()",
    "too-many-files": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (9, 9)); "
                      "[open('/dev/null') for _ in 'x' * 9]",
    "connection-refused": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); "
                          "socket.create_connection(s.getsockname())",
    "port-in-use": "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_server(s.getsockname())",
    "arguments-wrong": "import argparse; argparse.ArgumentParser().parse_args(['--no-such-option'])",
    "segmentation-fault": "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)",
    "aborted": "import faulthandler, os; faulthandler.enable(); os.abort()",
    "interrupted": "raise KeyboardInterrupt",
    "python-zerodivision": "1 / 0",
    "python-attribute": "None.shape",
    "python-recursion": "def f(): f()\nf()",
}  # fmt: skip


@pytest.mark.parametrize("code", PROGRAMS)
def test_what_python_says_is_known(code):
    program = subprocess.run([sys.executable, "-c", PROGRAMS[code]], capture_output=True, text=True, errors="replace")
    assert strongest(scan(enumerate(program.stderr.splitlines()))).signature.code == code, program.stderr


SHELLS = {"command-missing": "no-such-command", "not-executable": "/etc/passwd", "killed": "bash -c 'kill -9 $$'; true"}


@pytest.mark.parametrize("code", SHELLS)
def test_what_the_shell_says_is_known(code):
    english = {**os.environ, "LC_ALL": "C"}
    shell = subprocess.run(["bash", "-c", SHELLS[code]], capture_output=True, text=True, env=english)
    assert code in [hit.signature.code for hit in scan(enumerate(shell.stderr.splitlines()))], shell.stderr


# ---------------------------------------------------------------- its cost


def training_log(count):
    for step in range(count):
        yield (
            f"2026-11-20 13:{step // 60 % 60:02d}:{step % 60:02d} INFO step {step}/100000 "
            f"loss: {2 + step % 7 / 7:.4f} grad_norm=0.{step % 997} lr=2.00e-05 tokens/s={9000 + step % 999} "
            f"mem=57.3GiB rank{step % 64} error code 0"
        )


def test_harmless_lines_cost_no_pattern():
    texts = list(training_log(3000))
    assert catalogue._catalogue()._candidates(texts) == {}


def test_a_harmless_log_costs_little_more_than_reading_it():
    texts = list(training_log(15_000))

    def cost_of(work):
        started_s = time.process_time()
        assert work() == 0
        return time.process_time() - started_s

    plain_s = min(cost_of(lambda: sum("Error" in text for _, text in enumerate(texts))) for _ in range(3))
    scan_s = min(cost_of(lambda: sum(1 for _ in scan(enumerate(texts)))) for _ in range(3))
    assert scan_s < 300 * plain_s  # 50 to 90 seen: 6 to 8 s of a core for 100 MB


def test_no_line_makes_a_pattern_slow():
    """Lines that begin like a pattern over and over: four times the length may cost four times as much, not sixteen."""
    cost_s = {}
    patterns = [parse_pattern(text) for row in ROWS for text in row.patterns]
    assert max(pattern.text.count("{*}") for pattern in patterns) <= 2
    compiled = [(one.literals, one.compiled()) for one in {pattern.regex: pattern for pattern in patterns}.values()]
    for length in (LINE_LIMIT // 4, LINE_LIMIT):
        started_s = time.process_time()
        for literals, regex in compiled:
            body = "".join(literals[:-1]) or literals[0]
            for text in (literals[0], f"{body}1a "):
                regex.search((text * length)[:length])
        cost_s[length] = time.process_time() - started_s
    assert cost_s[LINE_LIMIT] < 10 * cost_s[LINE_LIMIT // 4], cost_s


# ---------------------------------------------------------------- real logs

SAMPLES = os.environ.get("ASCENDRUN_ASCEND_SAMPLES")
KNOWN = {
    "plog_910A_cqe_rank76*": {"EI0013"},
    "plog_debug_st_transport_timeout*": {"EI0006"},
    "plog_debug_st_event_timeout*": {"hccl-communicator-failed"},
    "plog_debug_st_aicpu_notify*": {"hccl-dispatch-timeout", "runtime-task-failed"},
    "log_torch_npu_error*": {
        "EI0002", "hccl-culprit-lost", "device-task-timeout", "ACL-500001", "op-binary-missing", "port-in-use",
        "bfloat16-unsupported", "tensor-not-contiguous",
        "devices-mixed", "autograd-misuse",
    },
    "log_hccl_plog*": {
        "EI0019", "EI0015", "hccl-root-unreachable", "hccl-address-family", "EI0016", "EI0014",
        "EI0005", "hccl-rank-table-unreadable", "EI0004", "hccl-culprit-lost",
        "hccl-culprit-stuck", "EI0002", "EI0012", "EI0013", "aicore-kernel-named", "hccl-ranks-connected",
        "hccl-communicator-failed",
    },
}  # fmt: skip


@pytest.mark.skipif(not SAMPLES, reason="ASCENDRUN_ASCEND_SAMPLES names no folder of real samples")
@pytest.mark.parametrize("pattern", KNOWN)
def test_the_errors_of_a_real_log_are_known(pattern):
    (path,) = Path(str(SAMPLES)).glob(pattern)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    assert KNOWN[pattern] <= {hit.signature.code for hit in scan(enumerate(lines, 1))}


@pytest.mark.skipif(not SAMPLES, reason="ASCENDRUN_ASCEND_SAMPLES names no folder of real samples")
def test_lines_of_a_real_log_that_tell_of_no_error_are_left_alone():
    told = []
    for path in sorted(Path(str(SAMPLES)).glob("plog_*")) + sorted(Path(str(SAMPLES)).glob("log_hccl*")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        told += [hit.text[:200] for hit in scan(enumerate(lines)) if "[INFO]" in hit.text and "crimer" not in hit.text]
    assert told == []
