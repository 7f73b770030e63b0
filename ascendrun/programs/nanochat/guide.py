"""The scripts of guide 002, which `ascendrun init nanochat` writes: each is a stage with the guide's options.

Options of NANOCHAT_ARGS replace those of a command line, so that a printed line runs in other sizes. Results are in
NANOCHAT_BASE_DIR (out), data is in NANOCHAT_DATA_DIR (data). Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from ascendrun.options import OptionProblem, ProgramOptions
from ascendrun.programs.nanochat import __main__ as program
from ascendrun.programs.trainer.options import InvalidOptionsError, exit_with, read_table, read_words
from ascendrun.text import Text, language_of, listed, use_language, write

BASE_DIR, DATA_DIR, REPLACED = "NANOCHAT_BASE_DIR", "NANOCHAT_DATA_DIR", "NANOCHAT_ARGS"
DEFAULTS = {BASE_DIR: "out", DATA_DIR: "data"}
SHORT = {
    "-i": "--source", "-a": "--task_name", "-x": "--max_problems", "-p": "--prompt", "-t": "--temperature",
    "-k": "--top_k", "-n": "--num_samples", "-m": "--max_new_tokens", "-b": "--max_num_seqs",
}  # fmt: skip
OWN = ("source", "task_name", "max_problems")
"""Options of the scripts that the program does not have."""

Task = Mapping[str, Union[str, int]]


@dataclass(frozen=True)
class Script:
    """`results`: its directory. `source`: the stage whose model it reads, if --source gives none. `tasks`: its mixture,
    of files in the data directory. `options`: defaults other than the program's."""

    mode: str
    results: str
    source: str = ""
    has_texts: bool = False
    tasks: Sequence[Task] = ()
    options: Mapping[str, str] = field(default_factory=dict)


CONVERSATIONS: Task = {"file": "conversations.jsonl", "kind": "messages"}
GSM8K: Task = {"file": "gsm8k_train.jsonl", "kind": "gsm8k"}
SCRIPTS: Mapping[str, Script] = {
    "tok_train": Script("tokenizer", "tokenizer", has_texts=True, options={"vocab_size": "65536"}),
    "base_train": Script("base", "base", has_texts=True),
    "base_eval": Script("evaluate", "eval-base", source="base", has_texts=True),
    "mid_train": Script(
        "mid",
        "mid",
        source="base",
        tasks=(
            CONVERSATIONS,
            {"file": "mmlu_auxiliary.jsonl", "kind": "choices"},
            GSM8K,
            {"kind": "spelling", "rows": 20000},
        ),
    ),
    "chat_sft": Script(
        "sft",
        "sft",
        source="mid",
        tasks=({"file": "arc_train.jsonl", "kind": "choices"}, GSM8K, {**CONVERSATIONS, "rows": 10000}),
    ),
    "chat_rl": Script("rl", "rl", source="sft", tasks=(GSM8K,)),
    "chat_eval": Script(
        "evaluate",
        "eval-{source}",
        source="sft",
        tasks=(
            {"file": "arc_test.jsonl", "kind": "choices"},
            {"file": "gsm8k_test.jsonl", "kind": "gsm8k"},
            {"file": "humaneval.jsonl", "kind": "code"},
            {"kind": "spelling", "rows": 200},
        ),
    ),
    "infer_bench": Script("infer_bench", "infer_bench-{source}", source="sft"),
    "chat_cli": Script("chat", "chat", source="sft"),
}
"""Files, sizes and their order are those of jobs/nanochat-speedrun.yaml; a test compares them."""


def run(name: str, argv: Sequence[str] | None = None) -> None:
    """Run a script as this rank, with the words of the command line; ends the process."""
    use_language(language_of())
    words = [SHORT.get(word, word) for word in (sys.argv[1:] if argv is None else argv)]
    if words[:1] == ["--"]:  # some versions of torchrun pass it on
        del words[0]
    if not {"-h", "--help"} & set(words):
        try:
            words = list(words_of(SCRIPTS[name], words, os.environ))
        except InvalidOptionsError as error:
            exit_with(error)
    program.main(words)


def words_of(script: Script, words: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the program's command line. Raises InvalidOptionsError."""
    table = read_table(program.OPTIONS)
    given, problems = read_words(words, table)
    replaced, more = read_words(shlex.split(environ.get(REPLACED, "")), table)
    if problems or more:
        raise InvalidOptionsError([*problems, *more])
    given, replaced = named(given, table), named(replaced, table)
    if replaced:
        shown = " ".join(f"--{name}={text}" for name, text in replaced.items())
        say(listed("guide.replaced", variable=REPLACED, options=shown))
    given = {**given, **replaced}
    own = {name: given.pop(name) for name in OWN if name in given}
    for advice in advices(environ):
        say(advice)
    for name, text in {**defaults(script, own, given, environ), **given}.items():
        yield f"--{name}={text}"


def named(texts: Mapping[str, str], table: ProgramOptions) -> dict[str, str]:
    """Return texts by the names of their options, where these are known."""
    return {option.name if (option := table.find(name)) else name: text for name, text in texts.items()}


def defaults(
    script: Script, own: Mapping[str, str], given: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the options of a script that the command line may replace. Raises InvalidOptionsError."""
    base, data = (Path(environ.get(name) or DEFAULTS[name]) for name in (BASE_DIR, DATA_DIR))
    source = own.get("source") or script.source
    found = {"mode": script.mode, "output_dir": str(base / script.results.format(source=source))}
    found.update(script.options)
    if script.mode == "base":
        found["tokenizer_dir"] = str(base / "tokenizer")
    if source:
        found["model_dir"] = str(base / source)
    if script.has_texts:
        found["data_path"] = str(data / "text")
    if script.tasks and "mixture" not in given:
        found["mixture"] = json.dumps(mixture_of(script, own, data))
    return found


def mixture_of(script: Script, own: Mapping[str, str], data: Path) -> list[dict[str, Any]]:
    """Return the tasks whose files are there; others are printed. Raises InvalidOptionsError if none is."""
    asked = [name.casefold() for name in own.get("task_name", "").split("|") if name]
    names = [str(task.get("file") or task["kind"]) for task in script.tasks]
    stems = {name.partition("_")[0].partition(".")[0]: task for name, task in zip(names, script.tasks)}
    unknown = [name for name in asked if not name.startswith(tuple(stems))]
    if unknown:
        message = listed("guide.task-name", names=unknown, known=list(stems))
        raise InvalidOptionsError([OptionProblem("task_name", message)])
    tasks = [task for stem, task in stems.items() if not asked or any(name.startswith(stem) for name in asked)]
    files = [data / str(task["file"]) if "file" in task else None for task in tasks]
    absent = [str(file) for file in files if file is not None and not file.exists()]
    used = [(task, file) for task, file in zip(tasks, files) if str(file) not in absent]
    if not used:
        message = listed("guide.no-tasks", files=absent)
        hint = listed("guide.no-tasks-hint", variable=DATA_DIR)
        raise InvalidOptionsError([OptionProblem("mixture", message, hint)])
    if absent:
        say(listed("guide.absent", files=absent))
    most = own.get("max_problems", "")
    rows = {"rows": int(most)} if most.isdigit() else {}
    return [{**task, **({} if file is None else {"file": str(file.absolute())}), **rows} for task, file in used]


def advices(environ: Mapping[str, str]) -> Iterator[Text]:
    """Answer what the guide advises for Ascend devices (facts and sources: ascend/tables/variables.json)."""
    if environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield listed("guide.blocking")
    if environ.get("ASCEND_GLOBAL_LOG_LEVEL") in ("0", "1"):
        yield listed(
            "guide.log-level",
            level=environ["ASCEND_GLOBAL_LOG_LEVEL"],
            meaning={"0": "debug", "1": "info"}[environ["ASCEND_GLOBAL_LOG_LEVEL"]],
        )


def say(message: Text) -> None:
    """Print a message on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr, flush=True)


def tok_eval() -> None:
    """Print how many bytes a token has in each kind of text, from the report of tok_train, next to other encodings."""
    use_language(language_of())
    folder = Path(os.environ.get(BASE_DIR) or DEFAULTS[BASE_DIR], "tokenizer")
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = listed("guide.no-tokenizer", error=str(error))
        hint = write("python -m scripts.tok_train")
        exit_with(InvalidOptionsError([OptionProblem(None, message, hint)]))
    columns = {"": report["bytes_per_token"], **report.get("tiktoken", {})}
    if len(columns) > 1:
        print(" " * 10, *(f"{name:>13s}" for name in columns))
    for kind in report["bytes_per_token"]:
        print(f"{kind:10s}", *(f"{sizes[kind]:13.3f}" if kind in sizes else " " * 13 for sizes in columns.values()))
