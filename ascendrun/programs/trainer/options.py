"""The command line of a program, parsed with the program's table of options (`ascendrun.option_tables`)."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NoReturn

from ascendrun import option_tables, options
from ascendrun.options import COMMAND_LINE, OptionProblem, ProgramOptions
from ascendrun.planner.training import AUTO, batch_of_ranks
from ascendrun.text import language_of, listed, use_language, write

INDENT = " " * 6


class InvalidOptionsError(Exception):
    """Some options are invalid; `problems` has all of them."""

    def __init__(self, problems: Sequence[OptionProblem]) -> None:
        super().__init__("\n".join(_line(problem) for problem in problems))
        self.problems = tuple(problems)


def read_table(path: Path) -> ProgramOptions:
    """Return the options of the program that the file `options.json` belongs to."""
    return option_tables.read_table(path.parent.name, path.read_text(encoding="utf-8"))


def parse(argv: Sequence[str], table: ProgramOptions) -> dict[str, Any]:
    """Return values by option name. Raises InvalidOptionsError with every problem; exits 0 after --help."""
    if "--help" in argv or "-h" in argv:
        print(make_help(table), end="")
        raise SystemExit(0)
    texts, problems = read_words(argv, table)
    given: dict[str, Any] = {}
    for name, text in texts.items():
        option = table.find(name)
        given[name] = text if option is None else options.read_text(option, text)
    values, more = options.check_arguments(table, given, COMMAND_LINE)
    problems += more
    if values.get("micro_batch_size") == AUTO:
        problems.append(OptionProblem("micro_batch_size", listed("options.micro-auto")))
    if problems:
        raise InvalidOptionsError(problems)
    batch = batch_of_ranks(table, values, values.get("world_size") or int(os.environ.get("WORLD_SIZE", "1")))
    if batch is not None:
        values["global_batch_size"] = batch
    return {name: _as_list(value) for name, value in options.with_defaults(table, values).items()}


def read_words(argv: Sequence[str], table: ProgramOptions) -> tuple[dict[str, str], list[OptionProblem]]:
    """Return the text of each option by its name as given, with _ for - where the table has it, and all problems."""
    texts: dict[str, str] = {}
    problems: list[OptionProblem] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word[2:].partition("=")
        spelled = name.replace("-", "_")
        name = spelled if table.find(spelled) else name
        if not word.startswith("--") or not name:
            problems.append(OptionProblem(word, listed("options.stray", argument=word)))
        elif not equals and (not words or words[0].startswith("--")):
            message = listed("options.no-value", option=COMMAND_LINE.name(name))
            problems.append(OptionProblem(name, message, write(f"--{name}=VALUE")))
        else:
            texts[name] = text if equals else words.pop(0)
    return texts, problems


def make_help(table: ProgramOptions) -> str:
    """Return the text of --help: every option with its aliases, meaning, choices and default."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name.removesuffix('.__main__')}" if spec else table.program
    lines = [str(listed("options.usage", program=program)), ""]
    for option in table.options.values():
        default = option.default if option.default not in (None, "") else listed("options.none")
        text = listed("options.help", help=table.help(option), default=default)
        if option.choices:
            text = listed(
                "options.help-choices",
                help=table.help(option),
                choices=[str(choice) for choice in option.choices],
                default=default,
            )
        names = ", ".join(f"--{name}" for name in (option.name, *option.aliases))
        wrapped = textwrap.wrap(str(text), 100, initial_indent=INDENT, subsequent_indent=INDENT)
        lines += [f"  {names} {option.type.upper()}", *wrapped]
    return "\n".join(lines) + "\n"


def parse_or_exit(argv: Sequence[str], table: ProgramOptions) -> dict[str, Any]:
    """Parse like `parse`; an invalid command line ends the process with code 2 and all problems on stderr."""
    use_language(language_of())
    try:
        return parse(argv, table)
    except InvalidOptionsError as error:
        exit_with(error)


def exit_with(error: InvalidOptionsError) -> NoReturn:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None


def run_program(
    argv: Sequence[str],
    options_file: Path,
    stages: Mapping[str, tuple[str, str]],
    *,
    on_cpu: Callable[[Mapping[str, Any]], bool] = lambda values: False,
) -> NoReturn:
    """Run one rank of the program that `options.json` belongs to; ends the process.

    `stages`: for each --mode a module of its package, and the function of (values, runtime) in it; without the option
    its mode is "". Invalid options end the process with code 2 before torch is imported.
    """
    values = parse_or_exit(argv, read_table(options_file))
    from ascendrun.programs.trainer import runtime
    from ascendrun.programs.trainer.strategies.parallel import refuse_options
    from ascendrun.programs.trainer.trackers import tracking

    program, (module, name) = options_file.parent.name, stages[values.get("mode", "")]
    body = getattr(importlib.import_module(f"ascendrun.programs.{program}.{module}"), name)

    def stage(here: runtime.Runtime) -> None:
        refuse_options(program, values, here)
        with tracking(here, program, values):
            body(values, here)

    family = "cpu" if on_cpu(values) else values["device"]
    runtime.run(stage, family=family, timeout_s=values["dist_timeout_s"])


def main(file: str, train: Callable[[Mapping[str, Any], Any], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Run one rank of a program of your own: `train(options, here)` with the options of FILE.json, which is next to its
    `file` and has the form of the bundled programs' tables. Ends the process.

    The options `device` and `dist_timeout_s` have their meaning here if the table has them.
    """
    path = Path(file).with_suffix(".json")
    table = option_tables.read_table(path.stem, path.read_text(encoding="utf-8"))
    values = parse_or_exit(sys.argv[1:] if argv is None else argv, table)
    from ascendrun.programs.trainer import runtime

    runtime.run(
        lambda here: train(values, here),
        family=values.get("device", "auto"),
        timeout_s=values.get("dist_timeout_s", 600.0),
    )


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _line(problem: OptionProblem) -> str:
    error = listed("options.error", message=problem.message)
    return f"{error}\n{listed('options.hint', hint=problem.hint)}" if problem.hint else str(error)
