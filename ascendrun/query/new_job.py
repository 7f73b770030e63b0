"""Job file and hostfile from answers: `ascendrun init` without a name."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ascendrun.core.errors import ConflictError, InvalidInputError, Problem
from ascendrun.core.hosts import Host, parse_hostfile
from ascendrun.core.jobfile.spec import load_programs, parse_stages
from ascendrun.core.names import split_list
from ascendrun.query.templates import JOB_FILE, SCHEMA_FILE, templates_root, write_schema
from ascendrun.text import Text

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


def check_new_job(answers: NewJob, target: Path) -> str:
    """Return the job file of these answers. Raises InvalidInputError if it or the hostfile would not be valid,
    ConflictError when one of them exists in `target`."""
    taken = [str(path) for path in (target / JOB_FILE, target / HOSTFILE) if path.exists() or path.is_symlink()]
    if taken:
        raise ConflictError(
            Text("init.exists", "{paths}: file exists; nothing was copied", paths=taken),
            hint=Text("init.in-other-directory", "run it in another directory"),
        )
    job_text = _job_text(answers, parse_hostfile(_hostfile_text(answers), HOSTFILE))
    parse_stages(job_text, JOB_FILE, programs=load_programs())
    return job_text


def write_new_job(answers: NewJob, target: Path) -> tuple[Path, ...]:
    """Write the job file, its schema and the hostfile into `target` (made when missing); return them in this order.

    A script that is missing there is written too: the small training of the template script. Raises InvalidInputError;
    ConflictError when a file exists; then nothing was written.
    """
    job_text = check_new_job(answers, target)
    target.mkdir(parents=True, exist_ok=True)
    job_file, hostfile, script = target / JOB_FILE, target / HOSTFILE, target / _words(answers)[0]
    job_file.write_text(job_text, "utf-8")
    hostfile.write_text(_hostfile_text(answers), "utf-8")
    schema = write_schema(job_file)
    if script.suffix != ".py" or script.exists() or PurePosixPath(_words(answers)[0]).is_absolute():
        return job_file, *schema, hostfile
    script.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(templates_root() / "templates" / "script" / "train.py", script)
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
    import yaml

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
