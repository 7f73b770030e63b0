"""The tables of options, and the command lines read with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ascendrun import option_tables, options
from ascendrun.programs.trainer.options import InvalidOptionsError, make_help, parse, parse_or_exit, read_table

PROGRAMS = Path(__file__).resolve().parents[2] / "ascendrun" / "programs"
TABLE = option_tables.read_table(
    "demo",
    json.dumps(
        {
            "options": {
                "learning_rate": {"type": "float", "default": 1e-3, "min": 0, "help": "rate", "aliases": ["lr"]},
                "epochs": {"type": "int", "default": 10, "min": 1, "max": 99, "help": "passes"},
                "strategy": {
                    "type": "str",
                    "default": "auto",
                    "choices": ["auto", "ddp", "zero3"],
                    "help": "sharding",
                    "value_aliases": {"deepspeed": "zero3"},
                },
                "columns": {"type": "list", "default": [], "help": "names"},
                "warmup_steps": {"type": "int", "default": 0, "help": "steps", "excludes": ["warmup_ratio"]},
                "warmup_ratio": {"type": "float", "default": 0, "help": "fraction"},
                "packing": {"type": "bool", "default": True, "help": "packs 100 % {of} them"},
            },
            "refused": {"use_amp": "set dtype"},
        }
    ),
)


def problems(*argv):
    with pytest.raises(InvalidOptionsError) as caught:
        parse(argv, TABLE)
    return [
        (problem.name, problem.message.key, problem.hint.key if problem.hint else None)
        for problem in caught.value.problems
    ]


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*/options.json")), ids=lambda path: path.parent.name)
def test_every_default_of_a_bundled_program_fits_its_option(path):
    table = read_table(path)
    for option in table.options.values():
        if option.default is not None and not option.required:
            options.check_value(option, option.default)
    assert parse([], table).keys() == table.options.keys()


def test_values_get_the_type_of_their_row():
    values = parse(["--columns=time=T,lat=Y", "--lr=1e-4", "--packing", "no", "--epochs=3"], TABLE)
    assert values["columns"] == ["time=T", "lat=Y"] and values["packing"] is False
    assert (values["learning_rate"], values["epochs"], values["strategy"]) == (1e-4, 3, "auto")


def test_all_problems_of_a_command_line_are_reported_together():
    assert problems("--epoch=3", "--lr=fast", "--epochs=0", "--strategy=zero", "--packing=maybe", "stray") == [
        ("stray", "options.stray", None),
        ("epoch", "options.unknown", "suggest.did-you-mean"),
        ("lr", "options.value", None),
        ("epochs", "options.value", None),
        ("strategy", "options.value", "suggest.did-you-mean"),
        ("packing", "options.value", None),
    ]


def test_a_name_of_another_program_is_answered_with_what_to_write():
    assert problems("--use_amp=true") == [("use_amp", "options.refused", "option.demo.use_amp.refused")]


def test_aliases_of_names_and_values_are_accepted_but_not_together_with_the_name():
    assert parse(["--lr=2", "--strategy=deepspeed"], TABLE)["strategy"] == "zero3"
    assert problems("--lr=1", "--learning_rate=1") == [("learning_rate", "options.same", "options.remove")]
    assert problems("--warmup_ratio=1", "--warmup_steps=1") == [("warmup_steps", "options.excludes", None)]


def test_a_broken_table_is_reported_in_full():
    with pytest.raises(option_tables.InvalidTableError) as caught:
        option_tables.read_table(
            "bad",
            '{"options": {"A-b": {}, "x": {"type": "complex"}, "y": {"type": "int", "help": "", "mni": 1,'
            '"aliases": ["x"]}}, "more": 1}',
        )
    keys = [fault.values["fault"].key if "fault" in fault.values else fault.key for fault in caught.value.faults]
    assert keys == [
        "options.unknown-key",
        "options.name",
        "options.type",
        "options.no-help",
        "options.unknown-key",
        "options.defined-twice",
    ]


def test_a_value_may_follow_its_name_which_may_have_dashes():
    """S2-B3: upstream of guide 002 reads `--key=value` only; its later versions write dashes."""
    values = parse(["--warmup-steps", "7", "--learning-rate=0.5", "--epochs", "3"], TABLE)
    assert (values["warmup_steps"], values["learning_rate"], values["epochs"]) == (7, 0.5, 3)


def test_an_option_without_its_value_is_an_error(capsys):
    assert problems("--epochs", "--lr") == [
        ("epochs", "options.no-value", "suggest.write"),
        ("lr", "options.no-value", "suggest.write"),
    ]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["--epochs=3", "--mode"], TABLE)
    assert ended.value.code == 2 and "--mode" in capsys.readouterr().err


def test_the_help_lists_every_option_with_its_aliases():
    text = make_help(TABLE)
    assert "--learning_rate, --lr FLOAT" in text and "packs 100 % {of} them" in text


def test_a_wrong_command_line_ends_with_code_2_before_torch_is_loaded():
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ascendrun.programs.trajectory", "--gramar=3"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROGRAMS.parents[1],
    )
    assert ended.returncode == 2
    assert "--grammar" in ended.stderr and "| torch\n" not in ended.stderr


@pytest.mark.parametrize(
    "program, given, ranks, batch",
    [
        ("trajectory", ["--micro_batch_size=8"], 4, 32),
        ("trajectory", ["--micro_batch_size=8"], 1, 8),
        ("trajectory", ["--micro_batch_size=8", "--mode=plan", "--world_size=16"], 1, 128),
        ("trajectory", ["--micro_batch_size=8", "--global_batch_size=64"], 4, 64),
        ("trajectory", ["--micro_batch_size=0"], 4, 64),
        ("trajectory", [], 4, 64),
        ("qwen_lora", ["--micro_batch_size=2"], 4, 128),
        ("qwen_lora", ["--micro_batch_size=2", "--packing=false"], 4, 8),
    ],
)
def test_the_batch_of_a_device_alone_sets_that_of_all(monkeypatch, program, given, ranks, batch):
    """S0-37, S1-13: 8 and 6 a card, on any number of cards. A packed sequence has no fixed number of samples."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    values = parse(given, read_table(PROGRAMS / program / "options.json"))
    assert values["global_batch_size"] == batch


def test_a_list_of_mappings_is_json_on_the_command_line():
    table = read_table(PROGRAMS / "nanochat" / "options.json")
    given = [{"kind": "sums", "rows": 3}, {"file": "/data/a b.jsonl", "kind": "gsm8k"}]
    assert parse(["--mixture=" + json.dumps(given)], table)["mixture"] == given
    assert parse(list(options.make_arguments({"mixture": tuple(given)})), table)["mixture"] == given
    assert parse([], table)["mixture"] == []
    for wrong in ("sums", '{"kind": "sums"}', "[1]", '[{"kid": "sums"}]', '[{"kind": ["sums"]}]'):
        with pytest.raises(InvalidOptionsError):
            parse(["--mixture=" + wrong], table)
