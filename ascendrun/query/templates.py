"""The templates of `ascendrun init`: those of templates/, and the jobs of jobs/ with their hostfiles.

A directory of templates/ without a job file has more files for the job of its name.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.jobfile.model import job_json_schema
from ascendrun.text import Text, language, template_of

JOB_FILE = "job.yaml"
SCHEMA_FILE = "job.schema.json"
_SCHEMA_OF_CHECKOUT = re.compile(r"(?<=# yaml-language-server: \$schema=)\S+")


@dataclass(frozen=True)
class Template:
    """One template. `summary`: the first sentence of the job file's comment. `files`: the source of each file by its
    path in the target. `job_file`: the file to submit."""

    name: str
    summary: str
    files: dict[str, Path]
    job_file: str


def list_templates() -> tuple[Template, ...]:
    """Return every template, by name."""
    root = templates_root()
    found = [_from_directory(path.parent) for path in root.glob(f"templates/*/{JOB_FILE}")]
    found += [_from_job(path, root) for path in root.glob("jobs/*.yaml")]
    return tuple(sorted(found, key=lambda template: template.name))


def copy_template(name: str, target: Path) -> tuple[Path, ...]:
    """Copy the files of the template into `target` (made when missing); return the new files, the job file first.

    The JSON Schema is written next to the job file, whose first line names it for editors; an existing one is kept.
    Raises NotFoundError for an unknown name; ConflictError when a file exists; then nothing was copied.
    """
    template = _find(name)
    copies = {target / place: source for place, source in template.files.items()}
    taken = [str(path) for path in copies if path.exists() or path.is_symlink()]
    if taken:
        raise ConflictError(
            Text("init.exists", "{paths}: file exists; nothing was copied", paths=taken),
            hint=Text("init.other-directory", "name another directory: ascendrun init {name} DIRECTORY", name=name),
        )
    for path, source in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    job_file = target / template.job_file
    job_file.write_text(_SCHEMA_OF_CHECKOUT.sub(SCHEMA_FILE, job_file.read_text("utf-8"), count=1), "utf-8")
    return tuple(sorted([*copies, *write_schema(job_file)], key=lambda path: path != job_file))


def write_schema(job_file: Path) -> tuple[Path, ...]:
    """Write the JSON Schema of job files next to a job file; return its path, (): one is there, and is kept."""
    schema = job_file.with_name(SCHEMA_FILE)
    if schema.exists() or schema.is_symlink():
        return ()
    schema.write_text(json.dumps(job_json_schema(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return (schema,)


def templates_root() -> Path:
    """Return the directory with jobs/, hostfiles/ and templates/: inside the installed package, or the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def _find(name: str) -> Template:
    templates = {template.name: template for template in list_templates()}
    if name in templates:
        return templates[name]
    raise NotFoundError(
        Text("init.unknown", "unknown template {name:quote}", name=name),
        hint=Text("init.known", "known templates: {names}", names=list(templates)),
    )


def _from_directory(directory: Path) -> Template:
    summary = _summary(directory.name, directory / JOB_FILE)
    return Template(directory.name, summary, _files_of(directory), JOB_FILE)


def _files_of(directory: Path) -> dict[str, Path]:
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _from_job(path: Path, root: Path) -> Template:
    """Make a template of a job of jobs/. It stays next to hostfiles/, so that its relative paths remain valid."""
    files = {f"jobs/{path.name}": path}
    hostfile = _hostfile_of(path)
    if hostfile is not None:
        files[hostfile.relative_to(root).as_posix()] = hostfile
    directory = root / "templates" / path.stem
    if not (directory / JOB_FILE).exists():
        files.update(_files_of(directory))
    return Template(path.stem, _summary(path.stem, path), files, f"jobs/{path.name}")


def _hostfile_of(job_file: Path) -> Path | None:
    """Return the hostfile of the job, None: it names none of this package."""
    import yaml

    job = yaml.safe_load(job_file.read_text(encoding="utf-8"))  # a file of this package
    name = job.get("hostfile")
    path = (job_file.parent / name).resolve() if name else None
    return path if path is not None and path.is_file() else None


def _summary(name: str, path: Path) -> str:
    """Return the first sentence of the comment at the file's start, in the process's language; "" without a comment."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in head if not line.startswith("# yaml-language-server:"))
    sentence, stop, _ = text.partition(". ")
    return template_of(f"template.{name}", sentence + stop.rstrip(), language())
