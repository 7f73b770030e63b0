"""Makes a staged tree visible in the ranks' working folder, by links."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


def link_tree(tree: str, work: str, *, trees: str) -> list[str]:
    """Makes the tree's top-level entries visible in the working folder; returns the names that stay the user's own.

    Links of ours into another tree are replaced or removed; those that are right are left alone, since another stage
    of a pipeline may be running in this folder. Nothing else is touched.
    """
    prefix = os.fsencode(trees) + b"/"
    base = os.fsencode(work)
    wanted = {name: os.path.join(os.fsencode(tree), name) for name in os.listdir(os.fsencode(tree))}
    kept = []
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if os.path.islink(path) and os.readlink(path).startswith(prefix) and os.readlink(path) != wanted.get(name):
            os.unlink(path)
    for name, target in sorted(wanted.items()):
        path = os.path.join(base, name)
        try:
            os.symlink(target, path)
        except FileExistsError:
            if not (os.path.islink(path) and os.readlink(path) == target):
                kept.append(name.decode("utf-8", "surrogateescape"))
    return kept
