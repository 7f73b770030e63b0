"""What `ascendrun init` copies: the job skeletons of templates/ and the ready jobs of jobs/ with their hostfiles."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.errors import ConflictError, NotFoundError

JOB_FILE = "job.yaml"


@dataclass(frozen=True)
class Skeleton:
    """`says`: the first sentence of the job file's comment. `files`: where a copied file comes from, by its path
    in the target. `job_file`: the one of them to submit."""

    name: str
    says: str
    files: dict[str, Path]
    job_file: str


def list_skeletons() -> tuple[Skeleton, ...]:
    """Every skeleton, by name."""
    root = skeletons_root()
    found = [_from_folder(path.parent) for path in root.glob(f"templates/*/{JOB_FILE}")]
    found += [_from_job(path, root) for path in root.glob("jobs/*.yaml")]
    return tuple(sorted(found, key=lambda skeleton: skeleton.name))


def copy_skeleton(name: str, target: Path) -> tuple[Path, ...]:
    """Copies the skeleton's files into `target` (made when missing); returns the new files, the job file first.

    Raises NotFoundError for an unknown name; ConflictError when a file is there already, and then nothing was copied.
    """
    skeleton = _find(name)
    copies = {target / place: source for place, source in skeleton.files.items()}
    taken = [str(path) for path in copies if path.exists() or path.is_symlink()]
    if taken:
        raise ConflictError(
            f"{', '.join(taken)}: there already; nothing was copied",
            hint=f"name another folder: ascendrun init {name} FOLDER",
        )
    for path, source in copies.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
    return tuple(sorted(copies, key=lambda path: path != target / skeleton.job_file))


def skeletons_root() -> Path:
    """The folder of jobs/, hostfiles/ and templates/: inside the installed package, or the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "skeletons"
    return installed if installed.is_dir() else package.parent


def _find(name: str) -> Skeleton:
    skeletons = {skeleton.name: skeleton for skeleton in list_skeletons()}
    if name in skeletons:
        return skeletons[name]
    raise NotFoundError(f"there is no skeleton {name!r}", hint=f"there are: {', '.join(skeletons)}")


def _from_folder(folder: Path) -> Skeleton:
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    return Skeleton(folder.name, _first_sentence(folder / JOB_FILE), files, JOB_FILE)


def _from_job(path: Path, root: Path) -> Skeleton:
    """A ready job keeps its place beside hostfiles/, so that its own relative paths stay true."""
    files = {f"jobs/{path.name}": path}
    hostfile = _hostfile_of(path)
    if hostfile is not None:
        files[hostfile.relative_to(root).as_posix()] = hostfile
    return Skeleton(path.stem, _first_sentence(path), files, f"jobs/{path.name}")


def _hostfile_of(job_file: Path) -> Path | None:
    """None: the job names no hostfile of ours."""
    import yaml

    job = yaml.safe_load(job_file.read_text(encoding="utf-8"))  # our own file: nothing to guard against
    name = job.get("hostfile")
    path = (job_file.parent / name).resolve() if name else None
    return path if path is not None and path.is_file() else None


def _first_sentence(path: Path) -> str:
    """Of the comment at the file's head; "" without one."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in head if not line.startswith("# yaml-language-server:"))
    sentence, stop, _ = text.partition(". ")
    return sentence + stop.rstrip()
