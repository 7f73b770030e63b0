"""Rules of `container` of a job file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.tree import Draft
from ascendrun.core.reader.source_text import REMOVE
from ascendrun.core.reader.strict import MOUNT_PATTERN
from ascendrun.text import Text, write

OWN_OPTIONS = frozenset(
    "--name --rm -d --detach --network --net --pid --uts --user -u --userns --entrypoint --label -l --pull".split()
)
"""Options that the agent sets: stop, logs and the ownership of files depend on them."""


def container_rule(draft: Draft) -> Iterator[Problem]:
    container = draft.section("container")
    mounts, options = (container.get(key) for key in ("mounts", "options"))
    for index, mount in enumerate(mounts if isinstance(mounts, tuple) else ()):
        if isinstance(mount, str) and not re.match(MOUNT_PATTERN, mount):
            yield draft.value("container", "mounts", index).problem(
                Text("jobfile.mount", "container.mounts: expected SOURCE:TARGET[:ro], got {mount:quote}", mount=mount),
                Text("jobfile.mount-hint", "write absolute paths, such as /data:/data:ro"),
            )
    words = [word for word in options if isinstance(word, str)] if isinstance(options, tuple) else []
    for index, word in enumerate(words):
        if word.partition("=")[0] in OWN_OPTIONS:
            yield draft.value("container", "options", index).problem(
                Text("jobfile.own-option", "container.options: ascendrun sets {option}", option=word.partition("=")[0]),
                REMOVE,
            )
    size = container.get("shm_size")
    if not isinstance(size, str):
        return
    if not re.fullmatch(r"[1-9][0-9]*(MiB|GiB)", size):
        yield draft.value("container", "shm_size").problem(
            Text("jobfile.shm-size", "container.shm_size: expected a size in MiB or GiB, got {size:quote}", size=size),
            write("shm_size: 64GiB"),
        )
    if container.get("runtime") == "apptainer":
        yield draft.key("container", "shm_size").problem(
            Text("jobfile.shm-apptainer", "container.shm_size is not supported by apptainer"), REMOVE
        )
    if "--ipc=host" in words or ("--ipc", "host") in zip(words, words[1:]):
        yield draft.key("container", "shm_size").problem(
            Text("jobfile.shm-and-ipc", "container.shm_size cannot be combined with --ipc=host"),
            Text("jobfile.shm-and-ipc-hint", "remove one of them"),
        )
    if any(word.partition("=")[0] == "--shm-size" for word in words):
        yield draft.key("container", "shm_size").problem(
            Text("jobfile.shm-twice", "container.options repeats container.shm_size"), write("options: []")
        )
