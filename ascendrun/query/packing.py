"""Packing of what a job brings: its own directory, and the programs or the library, each one file named by its hash."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ascendrun
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.jobs.plan import CODE_TREE, LIBRARY_TREE, PROGRAMS_TREE, Tree
from ascendrun.core.node_messages import node_hint, node_text
from ascendrun.head.protocol.release import release_on_disk
from ascendrun.head.state.state_dir import StoreUnusableError, make_state_dir, tree_file
from ascendrun.node import tree_hash
from ascendrun.node.files import read_json, write_json
from ascendrun.output_file import write_output
from ascendrun.query.library import copy_library
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.planner.training import Program

_CACHE = "__pycache__"


def pack_trees(spec: Mapping[str, Any], state_dir: Path) -> tuple[Tree, ...]:
    """Pack the directory of a job (its `spec` as JSON values), and the programs for a bundled one, else what its script
    may import.

    Raises InvalidInputError (the directory) and StoreUnusableError.
    """
    make_state_dir(state_dir)
    trees: list[Tree] = []
    workdir = spec.get("workdir")
    if workdir is not None:
        exclude = (*workdir["exclude"], *_inside(state_dir, workdir["path"]))
        trees.append(_pack(CODE_TREE, workdir["path"], exclude, state_dir))
    try:
        trees.append(_pack_package(spec.get("program"), state_dir))
    except OSError as error:
        raise _unwritable(state_dir, error) from error
    return tuple(trees)


def pack_all(specs: Sequence[Mapping[str, Any]], state_dir: Path) -> list[tuple[Tree, ...]]:
    """Pack the directories of several jobs; those that have the same ones share the files."""
    keys = [(spec.get("program"), repr(spec.get("workdir"))) for spec in specs]
    packed = {key: pack_trees(spec, state_dir) for key, spec in dict(zip(reversed(keys), reversed(specs))).items()}
    return [packed[key] for key in keys]


def _pack_package(program: str | None, state_dir: Path) -> Tree:
    """Pack the programs, or the library: again only when a file of this package has changed."""
    is_own = program is not None and _own_program(program) is not None
    name = LIBRARY_TREE if program is None else PROGRAMS_TREE
    memory, release = str(tree_file(state_dir, name).with_suffix(".json")), release_on_disk([""])
    with suppress(OSError, ValueError, KeyError, TypeError):
        known: Any = read_json(memory)
        tree = Tree(**known["tree"])
        if not is_own and known["release"] == release and tree_file(state_dir, tree.sha256).exists():
            return tree
    with tempfile.TemporaryDirectory(prefix="packing-", dir=state_dir) as folder:  # not in /tmp, if it is killed
        if program is None:
            copy_library(Path(folder))
        else:
            _copy_programs(program, Path(folder))
        tree = _pack(name, folder, (), state_dir)
    if not is_own:
        write_json(memory, {"release": release, "tree": asdict(tree)}, durable=False)
    return tree


def _own_program(name: str) -> Program | None:
    """Return an installed program; None: a bundled one, or a file of the user."""
    from ascendrun.planner.training import find_programs  # not for a command

    found = find_programs().get(name)
    return None if found is None or found.is_bundled else found


def _unwritable(state_dir: Path, error: OSError) -> StoreUnusableError:
    from ascendrun.head.state.database import unwritable

    if isinstance(error, shutil.Error):  # of each file that was not copied
        return unwritable(state_dir / "trees", error.args[0][0][2])
    return unwritable(state_dir / "trees", error)


def _inside(state_dir: Path, folder: str) -> tuple[str, ...]:
    """Return the pattern that excludes ascendrun's state from a staged directory; () if the state is elsewhere."""
    below = os.path.relpath(os.path.realpath(state_dir), os.path.realpath(folder))
    return () if below.startswith("..") else (f"/{below}",)


def _copy_programs(program: str, folder: Path) -> None:
    """Copy the package as ranks need it: its programs, their options, rules and messages, nothing of the head. Of
    installed programs only the one that runs."""
    ignored = shutil.ignore_patterns(_CACHE)
    own = _own_program(program)
    if own is not None:
        shutil.copytree(own.folder, folder.joinpath(*own.package.split(".")), ignore=ignored)
    package = Path(ascendrun.__file__).resolve().parent
    for name in ("programs", "lightning", "planner", "facts", "text"):
        shutil.copytree(package / name, folder / "ascendrun" / name, ignore=ignored)
    for name in ("__init__.py", "client.py", "option_tables.py", "options.py"):
        shutil.copy(package / name, folder / "ascendrun")


def _pack(name: str, folder: str, exclude: Sequence[str], state_dir: Path) -> Tree:
    exclude = (*exclude, f"{_CACHE}/")
    try:
        entries = tree_hash.list_tree(folder, exclude)
        sha256 = tree_hash.hash_listing(entries)
        path = tree_file(state_dir, sha256)
        if not path.exists():
            path.parent.mkdir(exist_ok=True, mode=0o700)
            write_output(path, lambda file: tree_hash.write_tar(folder, entries, file), mode=0o600)
    except (OSError, tree_hash.InvalidTreeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unwritable(state_dir, error) from error
        raise not_staged(folder, error) from error
    return Tree(name=name, sha256=sha256, size_bytes=path.stat().st_size, files=len(entries))


def not_staged(path: str, error: OSError | tree_hash.InvalidTreeError) -> InvalidInputError:
    """Return why a file or directory is not sent to another machine."""
    rule = error.message if isinstance(error, tree_hash.InvalidTreeError) else None
    reason, hint = (str(error), None) if rule is None else (node_text(rule), node_hint(rule))
    message = Text("staging.not-possible", "cannot stage the directory: {reason}", reason=reason)
    return InvalidInputError([Problem(path, None, None, message, hint)])
