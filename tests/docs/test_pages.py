"""The reference of job files is that of the code, and everything that it offers is accepted."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ascendrun.cli.commands.completion import make_manuals
from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.keys import list_keys
from ascendrun.core.jobfile.model import UNSUPPORTED
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages
from ascendrun.head.survey.job_reading import read_stages
from ascendrun.planner.training import load_programs
from ascendrun.text import translations

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("key", list_keys(), ids=lambda key: key.path)
def test_the_example_of_a_key_is_accepted(key) -> None:
    assert key.example is not None
    given = yaml.safe_load(key.example)
    base = {
        "name": "demo",
        "devices": {"type": "npu"},
        "restart": {"max_restarts": 1},
        "checkpoint": {"dir": "/data/ckpt"},
        **({} if {"program", "roles"} & set(given) else {"command": ["x"]}),
    }
    if {"args", "sweep"} & set(given):
        base = {"name": "demo", "program": "qwen_lora"}
    devices = {**base.get("devices", {}), **given.get("devices", {})}
    if "container" in given:
        given["container"] = {"image": "site/cann", **given["container"]}
    stages = [{"name": "prepare"}, *given["stages"]] if "needs" in key.path else given.get("stages")
    job = {**base, **given, **({"devices": devices} if devices else {}), **({"stages": stages} if stages else {})}
    assert parse_stages(yaml.safe_dump(job), "job.yaml", programs=load_programs(parse_program_options))


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_validate_refuses_is_not_in_the_schema(key: str) -> None:
    assert key not in {each.path for each in list_keys()}
    section, _, name = key.partition(".")
    text = f"name: j\ncommand: [x]\n{section}: {{{name}: 1}}\n" if name else f"name: j\ncommand: [x]\n{key}: 1\n"
    with pytest.raises(InvalidInputError) as caught:
        parse_stages(text, "job.yaml", programs={})
    assert "jobfile.later" in {problem.message.key for problem in caught.value.problems}


@pytest.mark.parametrize("path", sorted([*ROOT.glob("jobs/*.yaml"), *ROOT.glob("templates/*/job.yaml")]), ids=str)
def test_a_shipped_job_names_the_schema_and_uses_no_old_key(path: Path) -> None:
    first, _, text = path.read_text(encoding="utf-8").partition("\n")
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "docs" / "job.schema.json"
    assert text and read_stages(path)


def blocks(language: str, path: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.S)


WITH_YAML = [path for path in sorted(ROOT.glob("docs/**/*.md")) if blocks("yaml", path)]
PAGES = [path for path in WITH_YAML if not path.name.startswith("job-file.")]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_job_files_of_a_page_are_accepted(page: Path) -> None:
    """Whole or in part: the rest is the least that a job file has, of the program that the page is about."""
    programs = dict(load_programs(parse_program_options))
    for table in blocks("json", page):
        if '"options"' in table:
            programs.setdefault("./my_gpt.py", parse_program_options("./my_gpt.py", table))
    for text in blocks("yaml", page):
        given = yaml.safe_load(text)
        if isinstance(given, dict) and "engines" not in given:  # else it is a settings file
            program = page.stem.replace(".zh", "")
            runs = {"program": program} if program in programs else {"command": ["x"]}
            rest = {"name": "demo", **({} if {"program", "command", "roles"} & set(given) else runs)}
            assert parse_stages(yaml.safe_dump({**rest, **given}), "job.yaml", programs=programs)


def overrides_of(page: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The job file and the `--set` of each cell of a guide; a cell without a file means the job of the page."""
    rows = page.read_text(encoding="utf-8").splitlines()
    (own, *_) = re.findall(r"\(\.\./\.\./(jobs/\S+\.yaml)\)", "\n".join(rows))
    cells = [
        cell for row in rows if row.startswith("| ") for cell in re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[-1])
    ]
    return [
        (ROOT / next(iter(re.findall(r"jobs/\S+\.yaml", cell)), own), tuple(re.findall(r"--set (\S+)", cell)))
        for cell in cells
    ]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guides/*.md")), ids=lambda path: path.name)
def test_the_lines_of_a_guide_change_its_job_as_they_say(page: Path) -> None:
    lines = overrides_of(page)
    assert any(overrides for _, overrides in lines)
    for job, overrides in lines:
        read_stages(job, overrides=[one for one in overrides if not one.startswith("args.data_path=FILE")])


@pytest.mark.parametrize("program", load_programs(parse_program_options))
def test_keys_and_options_are_explained_in_chinese(program: str) -> None:
    table = load_programs(parse_program_options)[program]
    texts = [key.meaning for key in list_keys()] + [table.help(option) for option in table.options.values()]
    assert not [text.key for text in texts if text.key not in translations("zh")]
    for text in texts:
        assert text.render("zh").count("{") == text.render("en").count("{")


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_accepts_the_man_pages(tmp_path: Path) -> None:
    for name, page in make_manuals().items():
        (tmp_path / name).write_text(page, encoding="utf-8")
    command = ["groff", "-K", "utf8", "-man", "-ww", "-z", *sorted(path for path in tmp_path.iterdir())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_every_claim_has_a_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| ([A-Z].*) \| (.+) \|$", page, re.M)
    assert len(rows) >= 15 and all(re.findall(r"`(test_\w+)`", tests) for _, tests in rows)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
    assert not missing, missing


PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = {
    "S0": (range(1, 59), range(1, 10)),
    "S1": (range(1, 39), (1, 2, 3, 5, 6, 7)),
    "S2": (range(1, 35), (1, 2, 3)),
    "N": (range(1, 82), ()),
    "S3": (range(1, 52), range(1, 11)),
    "S4": (range(1, 33), range(1, 9)),
    "C": ((*range(1, 8), *range(10, 33)), ()),
}
"""By guide: the numbers of its rows and of its bugs. C: of CodonTransformer itself."""
FOLDERS = (
    *"tests docs jobs bin benchmarks templates hostfiles".split(),
    *(path.name for path in (ROOT / "ascendrun").iterdir() if path.is_dir()),
)


def wanted() -> list[str]:
    ids = [
        [f"{guide}-{number:02d}" for number in numbers] + [f"{guide}-B{bug}" for bug in bugs]
        for guide, (numbers, bugs) in ROWS.items()
    ]
    return [one for many in ids for one in many]


def rows() -> list[tuple[str, str, str]]:
    return re.findall(r"^\| (S\d-\w+|[CN]-\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)


def paths_in(text: str) -> list[str]:
    return re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text)


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / "ascendrun" / path).exists()


def has_test(path: str, name: str) -> bool:
    return bool(re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE))


SHOWS = re.compile(r"(?<![\w/])(tests|benchmarks)/|`bin/(check|test)")
ADMITS = re.compile(r"\bnot (shown|asked|included|required|run)\b")
OTHER_ROW = re.compile(r"\b(?:as|from) ((?:S\d|N|C)-B?\d+)")


def is_shown(row: str, text_of: dict[str, str]) -> bool:
    """Whether the row names a test or a benchmark, another row that does, or what is not shown."""
    text = text_of[row]
    if SHOWS.search(text) or ADMITS.search(text):
        return True
    return any(other != row and is_shown(other, text_of) for other in OTHER_ROW.findall(text))


def test_every_row_of_the_guides_stands_there_once_in_order() -> None:
    assert [row for row, _, _ in rows()] == wanted()


def test_every_file_and_folder_that_is_named_is_there() -> None:
    named = sorted(set(paths_in(PAGE)))
    assert len(named) > 40
    assert [path for path in named if not exists(path)] == []


def test_every_test_that_is_named_is_there() -> None:
    named = sorted(set(re.findall(r"(tests/[\w/.-]+\.py)::(\w+)", PAGE)))
    assert len(named) > 30
    assert [(path, name) for path, name in named if not has_test(path, name)] == []


def test_every_row_names_what_shows_it_or_what_is_not_shown() -> None:
    text_of = {row: where for row, _, where in rows()}
    assert [row for row in text_of if not is_shown(row, text_of)] == []


def test_every_bug_has_a_test_that_says_its_name() -> None:
    homes: dict[str, list[str]] = {
        row: [path for path in paths_in(where) if path.startswith("tests/")] for row, _, where in rows() if "-B" in row
    }
    silent = [
        (row, paths)
        for row, paths in homes.items()
        if not any(re.search(rf"{row}\b", (ROOT / path).read_text(encoding="utf-8")) for path in paths)
    ]
    assert silent == []


def test_every_verb_that_is_named_exists() -> None:
    from ascendrun.cli.app import COMMANDS

    named = set(re.findall(r"`ascendrun ([a-z]+)", PAGE))
    assert named and named <= {verb.name for verb in COMMANDS}
