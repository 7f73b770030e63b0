"""What `ascendrun init` writes: the templates of templates/, the jobs of jobs/ with their hostfiles, or from answers.

A directory of templates/ without a job file has more files for the job of its name.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ascendrun.carried import data_root
from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, Problem
from ascendrun.core.hosts import Host, parse_hostfile
from ascendrun.core.jobfile.model import job_json_schema
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages
from ascendrun.core.names import split_list
from ascendrun.planner.training import load_programs
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
    root = data_root()
    found = [
        Template(path.parent.name, _summary(path.parent.name, path), _files_of(path.parent), JOB_FILE)
        for path in root.glob(f"templates/*/{JOB_FILE}")
    ]
    found += [_from_job(path, root) for path in root.glob("jobs/*.yaml")]
    return tuple(sorted(found, key=lambda template: template.name))


def copy_template(name: str, target: str | Path = ".") -> tuple[Path, ...]:
    """Copy the files of the template into `target` (made when missing); return the new files, the job file first.

    The JSON Schema is written next to the job file, whose first line names it for editors; an existing one is kept.
    Raises NotFoundError for an unknown name; ConflictError when a file exists; then nothing was copied.
    """
    template, target = _find(name), Path(target)
    copies = {target / place: source for place, source in template.files.items()}
    taken = [str(path) for path in copies if path.exists() or path.is_symlink()]
    if taken:
        raise ConflictError.of(
            "init.exists",
            "{paths}: file exists; nothing was copied",
            "name another directory: ascendrun init {name} DIRECTORY",
            paths=taken,
            name=name,
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


def _find(name: str) -> Template:
    templates = {template.name: template for template in list_templates()}
    if name in templates:
        return templates[name]
    raise NotFoundError.of(
        "init.unknown", "unknown template {name:quote}", "known templates: {names}", name=name, names=list(templates)
    )


def _files_of(directory: Path) -> dict[str, Path]:
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _from_job(path: Path, root: Path) -> Template:
    """Make a template of a job of jobs/. It stays next to hostfiles/, so that its relative paths remain valid."""
    files = {f"jobs/{path.name}": path}
    name = yaml.safe_load(path.read_text(encoding="utf-8")).get("hostfile")  # a file of this package
    hostfile = (path.parent / name).resolve() if name else None
    if hostfile is not None and hostfile.is_file():
        files[hostfile.relative_to(root).as_posix()] = hostfile
    directory = root / "templates" / path.stem
    if not (directory / JOB_FILE).exists():
        files.update(_files_of(directory))
    return Template(path.stem, _summary(path.stem, path), files, f"jobs/{path.name}")


def _summary(name: str, path: Path) -> str:
    """Return the first sentence of the comment at the file's start, in the process's language; "" without a comment."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in head if not line.startswith("# yaml-language-server:"))
    sentence, stop, _ = text.partition(". ")
    return template_of(f"template.{name}", sentence + stop.rstrip(), language())


HOSTFILE = "cluster.hosts"


@dataclass(frozen=True)
class NewJob:
    """Answers about a job. "" means none.

    `hosts`: names, ranges (`npu[01-04]`) or NAME=ADDRESS; the address `local` is this machine. `user`: of SSH.
    `per_node`: devices, as written. `python`: an interpreter, or the directory of an environment with bin/python.
    `set_env`: file of CANN that is sourced first. `interface`: of the network between the ranks, "": by the routes.
    `script`: a script and its arguments. A relative path is a file next to the job file, which is staged.
    """

    hosts: str
    user: str = ""
    devices: str = "npu"
    per_node: str = "8"
    python: str = "python3"
    set_env: str = ""
    interface: str = ""
    script: str = "train.py"


def check_new_job(answers: NewJob, target: str | Path = ".") -> str:
    """Return the job file of these answers. Raises InvalidInputError if it or the hostfile would not be valid,
    ConflictError when one of them exists in `target`."""
    files = (Path(target, JOB_FILE), Path(target, HOSTFILE))
    taken = [str(path) for path in files if path.exists() or path.is_symlink()]
    if taken:
        raise ConflictError.of(
            "init.exists-here", "{paths}: file exists; nothing was copied", "run it in another directory", paths=taken
        )
    job_text = _job_text(answers, parse_hostfile(_hostfile_text(answers), HOSTFILE))
    parse_stages(job_text, JOB_FILE, programs=load_programs(parse_program_options))
    return job_text


def write_new_job(answers: NewJob, target: str | Path = ".") -> tuple[Path, ...]:
    """Write the job file, its schema and the hostfile into `target` (made when missing); return them in this order.

    A script that is missing there is written too: the small training of the template script. Raises InvalidInputError;
    ConflictError when a file exists; then nothing was written.
    """
    job_text, target = check_new_job(answers, target), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    job_file, hostfile, script = target / JOB_FILE, target / HOSTFILE, target / _words(answers)[0]
    job_file.write_text(job_text, "utf-8")
    hostfile.write_text(_hostfile_text(answers), "utf-8")
    schema = write_schema(job_file)
    if script.suffix != ".py" or script.exists() or PurePosixPath(_words(answers)[0]).is_absolute():
        return job_file, *schema, hostfile
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data_root() / "templates" / "script" / "train.py", script)
    return job_file, *schema, hostfile, script


def _hostfile_text(answers: NewJob) -> str:
    lines = []
    for word in (piece for part in answers.hosts.split() for piece in split_list(part) if piece):
        name, _, address = word.partition("=")
        user = answers.user if address != "local" else ""
        options = {"slots": answers.per_node, "addr": address, "user": user}
        lines.append(" ".join([name, *(f"{key}={value}" for key, value in options.items() if value)]))
    return "\n".join(lines) + "\n"


def _words(answers: NewJob) -> list[str]:
    """Return the script and its arguments. Raises InvalidInputError."""
    try:
        words = shlex.split(answers.script)
    except ValueError:  # a quote that is not closed
        words = []
    if not words:
        message = Text("init.no-script", "expected a script and its arguments")
        raise InvalidInputError([Problem(JOB_FILE, None, None, message)])
    return words


def _job_text(answers: NewJob, hosts: tuple[Host, ...]) -> str:
    words = _words(answers)
    script = PurePosixPath(words[0])
    has_path = "/" in answers.python
    name = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-") or "training"
    count = int(answers.per_node) if answers.per_node.isdigit() else answers.per_node
    job: dict[str, Any] = {
        "name": name,
        "command": [*(["python" if has_path else answers.python] if script.suffix == ".py" else []), *words],
        "nodes": len(hosts),
        "devices": {"type": answers.devices, "per_node": count},
        "hostfile": HOSTFILE,
    }
    if not script.is_absolute():
        job["workdir"] = {"path": ".", "exclude": ["data/", "checkpoints/", ".git/"]}
    if has_path:
        is_interpreter = PurePosixPath(answers.python).name.startswith("python")
        job["python"] = answers.python if is_interpreter else answers.python.rstrip("/") + "/bin/python"
    if answers.set_env:
        job["setup"] = f"source {shlex.quote(answers.set_env)}"
    if answers.interface:
        own = {
            "npu": {"HCCL_SOCKET_IFNAME": f"={answers.interface}"},
            "cuda": {"NCCL_SOCKET_IFNAME": answers.interface},
        }
        both = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), answers.interface)
        job["env"] = {**own.get(answers.devices, {}), **both}
    body = yaml.safe_dump(job, sort_keys=False, default_flow_style=None, allow_unicode=True, width=1000)
    return f"# yaml-language-server: $schema={SCHEMA_FILE}\n{body}"
