"""Job files that are right: what they mean, with overrides, with paths made absolute, and as JSON."""

import gc
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.errors import InvalidInputError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobfile.model import JobBody, JobSpec, job_json_schema
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages, require_hostfile, resolve_paths
from ascendrun.core.jobs.placement import placement_faults

TRAJECTORY = parse_program_options(
    "trajectory",
    json.dumps(
        {
            "options": {
                "lr": {"type": "float", "default": 1e-3, "help": "rate", "min": 0, "max": 1},
                "epochs": {"type": "int", "default": 10, "help": "passes"},
                "note": {"type": "str", "default": "", "help": "free text"},
                "data": {"type": "path", "default": "", "help": "tracks"},
                "fp16": {"type": "bool", "default": False, "help": "half"},
                "columns": {"type": "list", "default": [], "help": "names"},
            }
        }
    ),
)
PROGRAMS = {"trajectory": TRAJECTORY}
SMALL = "name: small\ncommand: [python, train.py]\n"
PROGRAM = "name: small\nprogram: trajectory\n"


def parse(text, *overrides):
    return parse_stages(text, "job.yaml", overrides=overrides, programs=PROGRAMS)[0].spec


def problems(text, *overrides):
    with pytest.raises(InvalidInputError) as caught:
        parse(text, *overrides)
    return [str(problem) for problem in caught.value.problems]


def test_ten_thousand_unknown_keys_are_a_few_lines() -> None:
    keys = [f"nod{number}s: 1" for number in range(10_000)]
    found = problems("\n".join(["name: x", "command: [a]", *keys]))
    assert len(found) == 6 and "9995" in found[-1]
    assert len(problems("\n".join(["name: x", "command: [a]", *keys[:20]]))) == 20


FULL = """
name: full
command: [/bin/sh, -c, 'echo "$(id)" && true']
launcher: none
nodes: 2
devices: {type: npu, ids: [0, 1, 2, 3]}
hostfile: ../hostfiles/two.hosts
args: {}
env: {HCCL_CONNECT_TIMEOUT: 1200, RATE: 1.10, DEBUG: True, WHEN: 2026-01-02, EMPTY: "", MASTER_PORT: 12345}
env_file: [secrets.env]
labels: {project: 1.10, team: llm}
setup: |
  source /usr/local/Ascend/ascend-toolkit/set_env.sh
  ulimit -n 65535
python: /opt/conda/envs/npu/bin/python
workdir: {path: ., exclude: [data/, .git/, '*.ckpt']}
checkpoint: {dir: /ckpt/full, grace_period_s: 300, signal: USR1}
timeouts: {start_s: 1e3, run_s: null}
sampling: {interval_s: 5}
checks: {skip: [], require: []}
"""


def test_every_field_of_this_release_is_read():
    spec = parse(FULL)
    assert spec.command == ("/bin/sh", "-c", 'echo "$(id)" && true')
    assert spec.devices.ids == (0, 1, 2, 3) and spec.nodes == 2 and spec.timeouts.start_s == 1000.0
    assert dict(spec.env) == {
        "HCCL_CONNECT_TIMEOUT": "1200",
        "RATE": "1.10",
        "DEBUG": "true",
        "WHEN": "2026-01-02",
        "EMPTY": "",
        "MASTER_PORT": "12345",
    }
    assert dict(spec.labels) == {"project": "1.10", "team": "llm"}
    assert spec.setup == "source /usr/local/Ascend/ascend-toolkit/set_env.sh\nulimit -n 65535\n"
    assert (spec.checkpoint.dir, spec.checkpoint.grace_period_s, spec.checkpoint.signal) == (
        "/ckpt/full",
        300.0,
        "USR1",
    )


def test_the_defaults_are_a_cpu_job_on_all_hosts():
    spec = parse(SMALL)
    assert (spec.nodes, spec.launcher, spec.devices.type, spec.devices.per_node) == (None, "spawn", "cpu", None)
    assert spec.timeouts.run_s is None


def test_a_job_survives_the_store():
    for text in (SMALL, FULL, PROGRAM + "args: {lr: 1e-4, columns: [a, b], note: 'x\ny', fp16: true, epochs: null}\n"):
        spec = parse(text)
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_windows_line_ends_and_a_byte_order_mark_do_not_matter():
    assert parse(b"\xef\xbb\xbf" + FULL.replace("\n", "\r\n").encode()) == parse(FULL)


def test_null_means_not_given():
    assert parse(SMALL + "nodes:\nenv:\nhostfile: ~\ndevices: {per_node: null}\nprogram:\n") == parse(SMALL)


def test_numbers_with_exponents_are_numbers_where_numbers_are_wanted():
    spec = parse(PROGRAM + "args: {lr: 2e-5, epochs: 1e1}\nnodes: 1e0\n")
    assert spec.args == {"lr": 2e-5, "epochs": 10} and spec.nodes == 1
    assert isinstance(spec.args["epochs"], int)


def test_a_text_option_takes_a_number_as_it_was_written():
    assert parse(PROGRAM + "args: {note: 1.10}\n").args["note"] == "1.10"


def test_the_words_of_a_command_stay_as_they_were_written():
    spec = parse("name: a\ncommand: [python, train.py, --lr, 2e-5, --n, 1.0, --flag, true, 2026-01-02]\n")
    assert spec.command == ("python", "train.py", "--lr", "2e-5", "--n", "1.0", "--flag", "true", "2026-01-02")


def test_escaped_bidi_marks_and_shell_text_are_data_in_values():
    spec = parse('name: a\ncommand: [echo, "\\u202e", "$(id)", "`x`", "a\\nb", \'it\'\'s\', ""]\n')
    assert spec.command == ("echo", "\u202e", "$(id)", "`x`", "a\nb", "it's", "")


def test_overrides_are_laid_over_the_file_and_the_last_wins():
    spec = parse(
        PROGRAM + "args: {lr: 1}\n",
        "args.lr=0.1",
        "args.lr=1e-4",
        "nodes=3",
        "devices.per_node=2",
        "timeouts={start_s: 5}",
        'name="other"',
        "args.columns=[a, b]",
    )
    assert spec.args == {"lr": 1e-4, "columns": ("a", "b")} and spec.nodes == 3
    assert (spec.devices.per_node, spec.timeouts.start_s, spec.name) == (2, 5.0, "other")


@pytest.mark.parametrize("value", ["a: b", "x #y", "*a", "&a", "!t", "a=b", "%", "- x", "a,b", "it's"])
def test_the_value_of_an_override_is_taken_as_it_stands(value):
    assert parse(SMALL, f"env.A={value}").env["A"] == value


def test_an_empty_override_is_an_empty_text_and_null_takes_back():
    assert parse(SMALL, "env.A=").env["A"] == ""
    assert parse(SMALL + "nodes: 3\n", "nodes=null").nodes is None


@pytest.mark.parametrize(
    "override, keys",
    [
        ("args.lrr=1", "options.unknown | suggest.did-you-mean"),
        ("nodes=two", "jobfile.value | suggest.write"),
        ("nodes=012", "yaml.trap | yaml.trap-hint"),
        ("nodes", "override.form | suggest.write"),
        ("a..b=1", "override.form | suggest.write"),
        ("name.x=1", "override.no-mapping | suggest.write"),
        ("args.columns=[a", "yaml.syntax | yaml.bracket"),
        ("spare_node=1", "jobfile.unknown-key | suggest.did-you-mean"),
    ],
)
def test_a_problem_of_an_override_names_the_override(override, keys):
    with pytest.raises(InvalidInputError) as caught:
        parse(PROGRAM, override)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == (f"--set {override}", None)
    assert " | ".join(text.key for text in (problem.message, problem.hint)) == keys


def test_problems_of_the_file_and_of_overrides_come_together():
    told = problems("nmae: x\n" + PROGRAM, "nodes=0")
    assert [text.split(": ")[0] for text in told] == ["job.yaml:1:1", "--set nodes=0"]


def test_paths_are_relative_to_the_job_file_and_those_of_the_nodes_stay():
    spec = parse(
        "name: a\nprogram: trajectory\nhostfile: ../h\nworkdir: {path: .}\nenv_file: [s.env]\n"
        "args: {data: d/../x.csv, note: n}\ncheckpoint: {dir: /ckpt}\npython: python3.9\n"
    )
    found = resolve_paths(spec, "/home/me/jobs", PROGRAMS)
    assert (found.hostfile, found.workdir.path, found.env_file[0]) == (
        "/home/me/h",
        "/home/me/jobs",
        "/home/me/jobs/s.env",
    )
    assert found.args == {"data": "/home/me/jobs/x.csv", "note": "n"}
    assert (found.checkpoint.dir, found.python) == ("/ckpt", "python3.9")
    assert resolve_paths(found, "/elsewhere", PROGRAMS) == found


def test_a_job_without_a_hostfile_is_an_error_and_never_a_local_run():
    with pytest.raises(InvalidInputError) as caught:
        require_hostfile(parse(SMALL), "job.yaml")
    assert caught.value.problems[0].message.values == {"key": "hostfile"}
    assert require_hostfile(parse(SMALL + "hostfile: h\n"), "job.yaml") == "h"


class Cycle:
    """Garbage whose collection lets another thread run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        time.sleep(0)


def new_class_loaded() -> bool:
    @dataclass(frozen=True)
    class Row:
        values: "tuple[tuple[int, ...], ...]"

    return bool([Cycle() for _ in range(50)]) and load_dataclass(Row, {"values": [[1]]}).values == ((1,),)


def test_threads_that_read_the_schema_and_new_messages_at_once_do_not_disturb_each_other() -> None:
    """Python 3.11 fails to parse in two threads at once (python/cpython#106905)."""
    before, often = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            read = [threads.submit(lambda: [Cycle() for _ in range(50)] and job_json_schema()) for _ in range(16)]
            loaded = [threads.submit(lambda: [new_class_loaded() for _ in range(100)]) for _ in range(16)]
        assert all(all(one.result()) for one in loaded)
        assert len({json.dumps(one.result()) for one in read}) == 1
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(often)


def test_the_schema_describes_every_field_for_an_editor():
    schema = job_json_schema()
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert all(each.get("description") for each in schema["properties"].values())
    assert schema["additionalProperties"] is False and schema["required"] == ["name"]
    assert schema["$defs"]["Devices"]["properties"]["type"]["enum"] == ["npu", "cuda", "cpu"]
    json.dumps(schema)


def test_every_field_of_a_job_is_a_stages_too():
    assert set(JobSpec.model_fields) - set(JobBody.model_fields) == {"name", "stages", "sweep"}


def test_a_broken_option_table_is_an_invalid_input():
    with pytest.raises(InvalidInputError) as caught:
        parse_program_options("bad", '{"options": {"A-b": {}, "y": {"type": "int", "mni": 1}}}')
    assert [problem.file for problem in caught.value.problems] == ["bad/options.json"] * 3


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
variables = st.from_regex(r"X_[A-Z0-9_]{0,8}", fullmatch=True)


@given(st.lists(words, max_size=6), st.dictionaries(variables, words, max_size=5))
@example(["1E400"], {})  # PyYAML writes it without quotes
def test_any_word_and_any_variable_comes_back_to_the_bit(command, env):
    text = yaml.safe_dump({"name": "a", "command": ["run", *command], "env": env}, allow_unicode=False)
    spec = parse(text)
    assert spec.command == ("run", *command) and dict(spec.env) == env


pieces = st.sampled_from(
    [
        "name: a\n",
        "command: ",
        "[x]",
        "[",
        "]",
        "{",
        "}",
        "a",
        ": ",
        "\n",
        "- ",
        "  ",
        "&a ",
        "*a",
        "!!str ",
        "'",
        '"',
        "env:\n",
        "  A: 1\n",
        "on",
        "012",
        "---\n",
        "? ",
        "<<: ",
        "\t",
        "\0",
        "\u202e",
        "#",
        "|\n",
        "nodes: ",
        "devices: {",
        "stages: ",
        "null",
        "program: trajectory\n",
        "args: {lr: ",
        "~",
    ]
)


@settings(max_examples=400)
@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200), st.lists(pieces, max_size=25).map("".join)),
    st.lists(
        st.one_of(st.text(max_size=20), st.sampled_from(["args.lr=[", "env=1", "stages=[{}]", "name={a: b}"])),
        max_size=2,
    ),
)
def test_no_job_file_crashes_the_parser(data, overrides):
    try:
        spec = parse_stages(data, "job.yaml", overrides=overrides, programs=PROGRAMS)[0].spec
    except InvalidInputError as error:
        assert error.problems and all(problem.message for problem in error.problems)
    else:
        assert spec.name and (spec.command or spec.program)


def test_what_the_hosts_lack_is_reported_with_the_other_problems():
    hosts = parse_hostfile("a slots=4\n", "h")
    with pytest.raises(InvalidInputError) as caught:
        parse_stages(
            SMALL + "nodes: 2\ncolour: 3\ndevices: {per_node: 8}\n",
            "job.yaml",
            programs={},
            placement=lambda spec: placement_faults(spec, hosts),
        )
    assert [(problem.line, problem.message.key) for problem in caught.value.problems] == [
        (3, "plan.too-few-hosts"),
        (4, "jobfile.unknown-key"),
        (5, "plan.too-few-slots"),
    ]
