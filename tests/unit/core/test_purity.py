"""What core/ promises: no files, no clock; and that no decision reads the words of a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ascendrun

PACKAGE = Path(ascendrun.__file__).parent
TOUCHES = frozenset(
    "open read_text read_bytes write_text write_bytes exists is_file is_dir stat lstat unlink mkdir glob iterdir "
    "time monotonic clock_gettime now utcnow fdopen listdir scandir realpath TemporaryFile".split()
)
MODULES_OF_CLOCK_AND_FILES = frozenset({"time", "tempfile", "shutil", "socket", "subprocess"})
WORDS = frozenset({"key", "english"})
REASONS = frozenset({"reason", "why"})


def calls_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = node.func
            name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
            base = getattr(getattr(named, "value", None), "id", "")
            if (name in TOUCHES and base != "peers") or (base == "os" and name != "commonprefix"):
                yield node.lineno, f"{base}.{name}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            yield from ((node.lineno, name) for name in names if name in MODULES_OF_CLOCK_AND_FILES)


def reads_of_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield places that read the key, the template or the values of something that is called a reason or a why."""
    if not any(f"{name}." in text for name in REASONS):  # most modules; parsing takes long
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in WORDS | {"values"}:
            holder = node.value
            name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            if name in REASONS:
                yield node.lineno, f"{name}.{node.attr}"


def test_core_reads_no_file_and_no_clock() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {what}"
        for path in sorted((PACKAGE / "core").rglob("*.py"))
        for line, what in calls_of(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_no_decision_reads_the_words_of_a_reason() -> None:
    renders = {"core/records.py", "core/jobs/reasons.py", "core/jobs/endings.py"}  # endings: wraps another cause
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "text" and str(path.relative_to(PACKAGE)) not in renders
        for line, what in reads_of_words(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
