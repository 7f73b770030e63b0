"""What a death leaves of a training: checkpoints on the nodes, judged by rules of their own, and the metrics' lines."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

Save = tuple[int, str]
"""A step, and which save of it."""
Place = tuple[int, Optional[int]]
"""Which training of a run (a fine-tuning may have one of its head before), and its step."""
CLOCK = (
    "timestamp",
    "tokens_per_s",
    "samples_per_s",
    "device_memory_bytes",
    "mfu",
    "eval_duration_s",
    "duration_s",
    "event",
)


def whole_in(parent: Path) -> set[Save]:
    """Checkpoints here of which every byte is as its manifest says, and the manifest as it was written; without those
    that an attempt saved after a later one had begun before them (docs/epochs.md)."""
    starts = {int(file.stem): json.loads(file.read_text())["from_step"] for file in parent.glob(".epochs/0*.json")}
    found = {}
    for folder in parent.glob("step-*"):
        _, step, *epoch = folder.name.replace("-e", "-").split("-")
        later = [start for number, start in starts.items() if number > int(epoch[0] if epoch else 0)]
        if all(start is None or int(step) <= start for start in later):
            found[folder] = whole(folder)
    return {save for save in found.values() if save is not None}


def whole(folder: Path) -> Save | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if hashlib.sha256(json.dumps(without_hash(manifest)).encode()).hexdigest() != manifest["sha256"]:
            return None
        for name in manifest["here"]:
            content = (folder / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != manifest["parts"][name]["sha256"]:
                return None
        return int(manifest["step"]), str(manifest["facts"]["save"])
    except (OSError, ValueError, KeyError):
        return None


def without_hash(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name != "sha256"}


def newest_common(parents: Sequence[Path], *, is_sharded: bool) -> int | None:
    """The step that a resume has to go on from. Sharded: what all nodes have whole; else what any of them has."""
    found = [whole_in(parent) for parent in parents]
    usable = set.intersection(*found) if is_sharded else set.union(*found)
    return max(usable)[0] if usable else None


def half_written(parents: Iterable[Path]) -> int:
    """Folders in which a checkpoint was growing."""
    return sum(1 for parent in parents for _ in parent.glob(".step-*.tmp"))


def wound(parent: Path, how: str, lot: random.Random) -> str:
    """Damages the newest checkpoint of one node as an unlucky moment or a bad disk may; what was done."""
    folders = sorted(parent.glob("step-*"))
    if not folders:
        return "nothing to damage"
    newest = folders[-1]
    if how == "unnamed":  # this node died between the other node's rename and its own
        (newest / "manifest.json").unlink()
        newest.rename(parent / f".{newest.name}.lost-1.tmp")
        return f"{newest.name} not named"
    part = lot.choice(sorted(newest.iterdir()))
    content = part.read_bytes()
    if how == "cut":
        part.write_bytes(content[: lot.randrange(len(content))])
    else:
        place = lot.randrange(len(content))
        part.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    return f"{newest.name}/{part.name} {how}"


@dataclass(frozen=True)
class Story:
    """What rank 0 told in one life. `numbers`: by place, all that may not differ by a bit; `resumed`: the steps that
    it went on from, one for each training; `first`: of each training, the first step that it took."""

    numbers: Mapping[Place, Mapping[str, Any]]
    resumed: Sequence[int]
    first: Mapping[int, int]
    last: Mapping[int, int]


def read_story(files: Sequence[Path]) -> Story:
    numbers: dict[Place, dict[str, Any]] = {}
    resumed: list[int] = []
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    training = 0
    for line in lines_of(files):
        event = line.get("event")
        if event == "resume":
            resumed.append(line["step"])
        elif event == "end":
            training += 1
        elif event is None:
            if "loss" in line:
                first.setdefault(training, line["step"])
                last[training] = line["step"]
            kept = {
                name: value
                for name, value in line.items()
                if name not in CLOCK and not name.endswith("_s") and name != "step"
            }
            numbers.setdefault((training, line.get("step")), {}).update(kept)
    return Story(numbers, resumed, first, last)


def lines_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Whole lines only: the death may have cut the last one."""
    return [json.loads(line) for file in files for line in file.read_text().split("\n")[:-1] if line]


def difference(story: Story, straight: Story) -> str | None:
    """The first number that is not the undisturbed run's, None: all are."""
    for place, numbers in story.numbers.items():
        wanted = straight.numbers.get(place)
        if wanted is None:
            return f"training {place[0] + 1} step {place[1]} is none of the undisturbed run"
        for name, value in numbers.items():
            if value != wanted.get(name):
                return f"training {place[0] + 1} step {place[1]}: {name} is {value!r}, undisturbed {wanted.get(name)!r}"
    return None
