"""What the documents show is what happens."""

import os
import re
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ascendrun.cli.app import COMMANDS, cli
from ascendrun.cli.context import CliContext
from tests.docs.transcript import find_mismatch, read_transcript

CHECKOUT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".*_cache", ".hypothesis", "tests")
RUN_S = 900


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout that runs with this one's .venv."""
    copy = tmp_path / "ascendrun"
    shutil.copytree(CHECKOUT, copy, ignore=LEFT_OUT, symlinks=True)
    (copy / ".venv").symlink_to(CHECKOUT / ".venv")
    return copy


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
def test_the_first_transcript_of_the_readme_happens(checkout: Path, tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "ASCENDRUN_STATE_DIR": str(tmp_path / "state"),
        "ASCENDRUN_NODE_ROOT": str(tmp_path / "node"),
        "NO_COLOR": "1",
    }
    steps = read_transcript((CHECKOUT / "README.md").read_text(encoding="utf-8"))
    assert steps, "README.md shows no command"
    try:
        for command, expected in steps:
            run = subprocess.run(
                ["bash", "-c", command],
                cwd=checkout,
                env=environ,
                text=True,
                timeout=RUN_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert run.returncode == 0, run.stdout
            mismatch = find_mismatch(expected, run.stdout.splitlines())
            assert mismatch is None, f"{mismatch}\n--- what happened:\n{run.stdout}"
    finally:
        subprocess.run([checkout / "bin" / "ascendrun", "controller", "stop"], env=environ, timeout=60, check=False)


def test_a_transcript_is_held_against_the_output_line_by_line() -> None:
    output = ["loading 3 files", "step 1", "step 2", "done in 0.4 s"]
    assert find_mismatch(["loading 3 files", "...", "done in ... s"], output) is None
    assert find_mismatch(["loading  17 files", "step 1", "step 9", "done in 12.5 s"], output) is None
    wrong = find_mismatch(["loading all files", "..."], output)
    assert wrong == "'loading all files' did not come; there was 'loading 3 files'"
    assert find_mismatch(["..."], output) is None
    assert find_mismatch(["...", "step 1"], output) == "after 'step 1' there is more: 'step 2'"
    assert find_mismatch(["...", "stop 3", "..."], output) == "'stop 3' did not come; there was nothing more"
    assert find_mismatch(["...", "done in ... s", "...", "step 1", "..."], output) is not None


def links(path: Path) -> Iterator[tuple[str, Path]]:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target, path.parent / target


DOCUMENTS = [
    *sorted(path.name for path in CHECKOUT.glob("*.md")),
    *sorted(str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "docs").rglob("*.md")),
    "benchmarks/README.md",
]
COMMAND = re.compile(r"^(?: {4,}|\$ )(?:bin/)?ascendrun .*|`(?:bin/)?ascendrun [^`\n]+`", re.MULTILINE)
AFTER_COMMAND = re.compile(r"\s+(?:#|\||&|>|2>|<).*")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_links_to_are_there(name: str) -> None:
    assert [target for target, path in links(CHECKOUT / name) if not path.exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_that_a_document_names_are_there(name: str) -> None:
    text = (CHECKOUT / name).read_text(encoding="utf-8")
    assert [path for path in re.findall(r"\bdocs/[a-z-]+\.md\b", text) if not (CHECKOUT / path).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_that_a_document_shows_have_these_options(name: str) -> None:
    for shown in COMMAND.findall((CHECKOUT / name).read_text(encoding="utf-8")):
        words = AFTER_COMMAND.sub("", shown.strip("`$ ")).split()[1:]
        words = ["0" if word == "R" else word for word in words]  # the place of a rank
        if any(word.startswith(("[", "(")) for word in words):
            continue  # a usage line
        try:
            context = cli.make_context("ascendrun", list(words), obj=CliContext(environ={}))
            command_name, command, rest = cli.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None
            command.make_context(command_name, rest, parent=context)
        except (click.MissingParameter, click.exceptions.Exit):
            continue  # the name of a command; --help and --version
        except click.ClickException as error:
            raise AssertionError(f"{shown}: {error.format_message()}") from error


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "docs/failures.md"])
def test_modules_that_a_document_names_are_there(name: str) -> None:
    named = re.findall(r"\b((?:[a-z_]+/)+[a-z_]+\.py)\b", (CHECKOUT / name).read_text(encoding="utf-8"))
    roots = (CHECKOUT, CHECKOUT / "ascendrun")
    assert [module for module in named if not any((root / module).exists() for root in roots)] == []


def test_no_package_has_more_than_25_modules() -> None:
    package = CHECKOUT / "ascendrun"
    modules = Counter(path.parent for path in package.rglob("*.py") if path.name != "__init__.py")
    assert {str(folder): count for folder, count in modules.items() if count > 25} == {}


def test_the_readmes_job_file_is_the_templates() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    shown = textwrap.dedent(re.findall(r" *```yaml\n(.*?) *```", readme, re.DOTALL)[0])
    template = (CHECKOUT / "templates" / "script" / "job.yaml").read_text(encoding="utf-8")
    assert template.endswith(shown)


@pytest.mark.parametrize("page", ["commands.md", "commands.zh.md"])
def test_every_command_of_the_page_exists_and_every_command_is_there(page: str) -> None:
    section = (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    table = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    named = {word.split()[0] for word in re.findall(r"`([^`]+)`", table)}
    assert named == {command.name for command in COMMANDS if not command.hidden}
