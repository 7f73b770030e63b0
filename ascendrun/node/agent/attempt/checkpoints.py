"""The checkpoints in a directory, by format, and which of them are complete.

Nothing is unpickled: of large files only heads and tails are read, of an index its names and numbers. The layouts of
transformers, DeepSpeed and torch.distributed.checkpoint were read from files that these libraries wrote
(tests/unit/node/agent/test_checkpoints.py); that of Megatron from the source of megatron/training/checkpointing.py.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pickletools
import re
import time
import zipfile

from ascendrun.facts import headers
from ascendrun.node.files import names_in, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

Place = collections.namedtuple("Place", "step epoch format name")
"""A directory that has the name of a checkpoint."""

INDEX_BYTES = 64 << 20
"""Size of the largest index file (JSON, header, .metadata) that is read."""
DCP_FILE = re.compile(r"^__\d+_\d+\.distcp$")
LIMIT = 20
SEARCH_S = 20.0
"""Seconds after which older checkpoints are left out of the list."""
NAMES = (
    ("ascendrun", re.compile(r"^step-(\d{8})(?:-e(\d{4,}))?$")),
    ("transformers", re.compile(r"^checkpoint-(\d+)$")),
    ("deepspeed", re.compile(r"^global_step(\d+)$")),
    ("megatron", re.compile(r"^iter_(\d{7})$")),
    ("torch-dcp", re.compile(r"^(?:.*[^\d])?(\d+)$")),
)
POINTERS = {"deepspeed": "latest", "megatron": "latest_checkpointed_iteration.txt"}
"""Files that name the newest checkpoint. They are written after it."""
WEIGHTS = re.compile(r"^((adapter_)?model.*\.safetensors|(pytorch|adapter)_model.*\.bin|.*_fsdp.*|global_step\d+)$")
OPTIMIZER_PART = re.compile(r"^(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt$")
MODEL_PART = re.compile(r"^(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt$")


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """Return the newest checkpoints of request["folder"], newest first; complete ones up to request["limit"]."""
    folder, limit = str(request["folder"]), int(request.get("limit") or LIMIT)
    end_mono = time.monotonic() + SEARCH_S
    found, complete = [], 0
    places = places_in(folder)
    contents = {}
    for place in places:
        if complete >= limit or time.monotonic() > end_mono:
            break
        older = [each for each in places if each.format == place.format and each.step < place.step]
        others = [each.name for each in places if each.format == place.format and each.name != place.name]
        for name in [place.name, *others]:
            if name not in contents and place.format != "ascendrun":
                contents[name] = tree_of(os.path.join(folder, name))
        entry = describe(folder, place)
        if entry["whole"] and older:
            before = [contents.get(name, {}) for name in others]
            missing = missing_names(contents.get(place.name, {}), contents.get(older[0].name, {}), before)
            if missing:
                entry.update(whole=False, why="missing", file=missing[0])
        complete += entry["whole"]
        found.append(entry)
    return {"checkpoints": found}


def places_in(folder: str) -> list[Place]:
    """Return the directories with names of checkpoints, newest first. Raises OSError, but not if there is no folder."""
    found = []
    for name in names_in(folder):
        for form, pattern in NAMES:
            match = pattern.match(name)
            if match and os.path.isdir(os.path.join(folder, name)):
                if form != "torch-dcp" or is_dcp(os.path.join(folder, name)):
                    found.append(Place(int(match.group(1)), int((match.groups() + ("0",))[1] or 0), form, name))
                break
    return sorted(found, reverse=True)


def describe(folder: str, place: Place) -> dict[str, Any]:
    """Return one checkpoint. `parts`: names of the parts here; `of`: all parts, empty: all that matters is here."""
    path = os.path.join(folder, place.name)
    entry = {"format": place.format, "path": path, "step": place.step, "epoch": place.epoch, "save": ""}
    entry.update(parts=[], of=[], bytes=0, whole=True, why="", file="")
    try:
        if place.format == "ascendrun":
            entry.update(check_ours(folder, place))
        else:
            entry["bytes"] = sum(tree_of(path).values())
            entry.update(CHECKS[place.format](path, place.step) or {})
            check_pointer(folder, place)
    except TornError as torn:
        entry.update(whole=False, why=torn.code, file=torn.name)
    except OSError as error:
        entry.update(whole=False, why="unreadable", file=os.path.relpath(error.filename or path, path))
    return entry


def missing_names(names: dict[str, int], older: dict[str, int], others: list[dict[str, int]]) -> list[str]:
    """Return what the next older checkpoint has and this one lacks. Nothing if another one has the same names as this:
    then the layout has changed. The files of torch DCP are not compared: its index names those of its checkpoint, and
    another number of ranks writes others."""
    own = {without_step(name) for name in names}
    if any({without_step(name) for name in other} == own for other in others):
        return []
    lacks = [name for name in older if without_step(name) not in own]
    return sorted(name for name in lacks if not DCP_FILE.match(os.path.basename(name)))


def without_step(name: str) -> str:
    """Return the name without the number of the step, which nested directories carry."""
    return re.sub(r"global_step\d+", "global_step", name)


# --- each format ---


def check_ours(folder: str, place: Place) -> dict[str, Any]:
    """Check the manifest, the sizes, and the line of the epochs (docs/epochs.md)."""
    path = os.path.join(folder, place.name)
    manifest = read_json(path, "manifest.json")
    wanted = manifest.pop("sha256", None)
    if wanted != hashlib.sha256(json.dumps(manifest).encode()).hexdigest():
        raise TornError("invalid", "manifest.json")
    size = 0
    for name in manifest["here"]:
        found = os.stat(os.path.join(path, name)).st_size
        if found != manifest["parts"][name]["bytes"]:
            raise TornError("wrong-size", name)
        size += found
    for number, start in epoch_starts(folder):
        if number > place.epoch and place.step > start:
            raise TornError("replaced")
    facts = manifest["facts"]
    return {
        "bytes": size,
        "save": str(facts.get("save", "")),
        "parts": list(manifest["here"]),
        "of": sorted(manifest["parts"]),
    }


def epoch_starts(folder: str) -> Iterator[tuple[int, int]]:
    """Yield (epoch, step that it resumed from) of the epochs that have saved."""
    try:
        names = os.listdir(os.path.join(folder, ".epochs"))
    except OSError:
        return
    for name in names:
        if re.match(r"^\d{6,}\.json$", name):
            try:
                start = read_json(os.path.join(folder, ".epochs"), name).get("from_step")
            except (TornError, OSError):
                continue
            if isinstance(start, int):
                yield int(name[:-5]), start


def check_transformers(path: str, step: int) -> None:
    state = read_json(path, "trainer_state.json")
    if state.get("global_step") != step:
        raise TornError("invalid", "trainer_state.json")
    if not any(WEIGHTS.match(name) for name in os.listdir(path)):
        raise TornError("missing", "model.safetensors")
    check_indexes(path)
    check_gaps(path, re.compile(r"^rng_state_(\d+)\.pth$"))
    check_tree(path)
    for name in os.listdir(path):
        match = re.match(r"^global_step(\d+)$", name)
        if match:
            parts = check_deepspeed(os.path.join(path, name), int(match.group(1)))
            if set(parts["of"]) - set(parts["parts"]):
                raise TornError("missing", os.path.join(name, sorted(set(parts["of"]) - set(parts["parts"]))[0]))


def check_deepspeed(path: str, step: int) -> dict[str, Any]:
    """Return the parts of the optimizer state here, and those of all ranks as the model states count them."""
    names = sorted(os.listdir(path))
    models = [name for name in names if MODEL_PART.match(name)]
    parts = [name for name in names if OPTIMIZER_PART.match(name)]
    if not models:
        raise TornError("missing", "mp_rank_00_model_states.pt")
    check_tree(path)
    counts = pickled_counts(os.path.join(path, models[0]), ("dp_world_size", "mp_world_size"))
    if not parts or len(counts) < 2:
        return {"parts": models, "of": []}
    prefix = "bf16_" if parts[0].startswith("bf16_") else ""
    ranks = [(data, model) for data in range(counts["dp_world_size"]) for model in range(counts["mp_world_size"])]
    wanted = ["{}zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt".format(prefix, *rank) for rank in ranks]
    if models[0].startswith("zero_pp_rank"):
        wanted += ["zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt".format(*rank) for rank in ranks]
    return {"parts": [*parts, *models], "of": wanted}


def check_megatron(path: str, step: int) -> None:
    """Check the folders of the ranks; a distributed checkpoint is one of torch with a metadata.json next to it."""
    if os.path.exists(os.path.join(path, "metadata.json")) or is_dcp(path):
        read_json(path, "metadata.json")
        if not os.path.exists(os.path.join(path, "common.pt")):
            raise TornError("missing", "common.pt")
        check_dcp(path)
        return
    ranks = [name for name in os.listdir(path) if re.match(r"^mp_rank_\d{2}(_\d{3}){0,2}$", name)]
    if not ranks:
        raise TornError("missing", "mp_rank_00")
    for rank in ranks:
        if "model_optim_rng.pt" not in os.listdir(os.path.join(path, rank)):
            raise TornError("missing", os.path.join(rank, "model_optim_rng.pt"))
    check_tree(path)


def check_pointer(folder: str, place: Place) -> None:
    """Refuse a checkpoint that is newer than the one that the pointer file names."""
    pointer = POINTERS.get(place.format, "")
    _, step = read_pointer(os.path.join(folder, pointer))
    if step is not None and step < place.step:
        raise TornError("unnamed", pointer)


def read_pointer(path: str) -> tuple[str, int | None]:
    """Return the text of a pointer file and the step that it names; None: it names none, or cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(200).decode("utf-8", "replace").strip()
    except OSError:
        return "", None
    digits = re.search(r"(\d+)$", text)
    return text, int(digits.group(1)) if digits else None


def set_back_pointer(chosen: dict[str, Any]) -> dict[str, Any] | None:
    """Write the name of the chosen checkpoint {format, path, step} into a pointer file that names a newer one.

    Return {path, before, step} of the file that was changed, None: there was none. The old text is kept in NAME.old.
    Raises OSError.
    """
    if chosen["format"] not in POINTERS:
        return None
    folder, name = os.path.split(chosen["path"])
    path = os.path.join(folder, POINTERS[chosen["format"]])
    before, step = read_pointer(path)
    if step is None or step <= chosen["step"]:
        return None
    after = name if chosen["format"] == "deepspeed" else str(chosen["step"])
    for target, text in ((path + ".old", before), (path, after)):
        replace_file(target, text.encode())
    return {"path": path, "before": before, "step": chosen["step"]}


# --- files: of large ones only heads and tails are read ---


class TornError(Exception):
    """A checkpoint is not complete. `code`: why; `name`: of the file, relative to the checkpoint."""

    def __init__(self, code: str, name: str = "") -> None:
        super().__init__(code, name)
        self.code, self.name = code, name


def tree_of(path: str) -> dict[str, int]:
    """Return the size of each file below, by relative path."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            try:
                found[os.path.relpath(full, path)] = os.stat(full).st_size
            except OSError:
                found[os.path.relpath(full, path)] = 0
    return found


def check_tree(path: str) -> None:
    """Check every file by its suffix. Raises TornError."""
    for name, size in sorted(tree_of(path).items()):
        base = os.path.basename(name)
        full = os.path.join(path, name)
        if base.endswith(".json"):
            read_json(path, name)
        elif base.endswith(".safetensors"):
            check_safetensors(full, name, size)
        elif base.endswith((".pt", ".pth", ".bin", ".distcp")):
            check_zip(full, name, size)
        elif base == ".metadata" and os.path.dirname(name):
            check_dcp(os.path.dirname(full))


def check_gaps(path: str, pattern: Any) -> None:
    """Check that the numbers in names have no gap."""
    names = {int(match.group(1)): match.group(0) for match in map(pattern.match, os.listdir(path)) if match}
    for number in range(min(names, default=0), max(names, default=-1)):
        if number not in names:
            raise TornError("missing", names[max(names)].replace(str(max(names)), str(number)))


def check_indexes(path: str) -> None:
    """Check that the files which an index of shards names are here."""
    names = set(os.listdir(path))
    for index in sorted(name for name in names if name.endswith(".index.json")):
        for shard in sorted(set(read_json(path, index).get("weight_map", {}).values())):
            if shard not in names:
                raise TornError("missing", shard)


def read_json(path: str, name: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, name), "rb") as file:
            data = file.read(INDEX_BYTES)
    except FileNotFoundError:
        raise TornError("missing", name) from None
    try:
        values = json.loads(data.decode())
    except ValueError:
        raise TornError("invalid", name) from None
    return values if isinstance(values, dict) else {}


def check_safetensors(path: str, name: str, size: int) -> None:
    """Check that the file is as long as its header says."""
    try:
        expected = headers.read_safetensors(path).file_bytes
    except ValueError:
        raise TornError("invalid", name) from None
    if expected != size:
        raise TornError("wrong-size", name)


def check_zip(path: str, name: str, size: int) -> None:
    """Check that a file of torch.save ends with the directory of its zip archive. Other content (.bin) must exist."""
    with open(path, "rb") as file:
        head = file.read(4)
        file.seek(max(0, size - 22))
        tail = file.read(22)
    if head[:2] == b"PK" or name.endswith(".distcp"):
        if len(tail) < 22 or tail[:4] != b"PK\x05\x06":
            raise TornError("wrong-size", name)
    elif not name.endswith(".bin") or not head.strip(b"\0"):
        raise TornError("invalid", name)


# --- indexes that are pickles: read as tokens, never executed ---


def check_dcp(path: str, step: int = 0) -> None:
    """Check that each file reaches as far as the index says."""
    ends = dcp_ends(path)
    for name, end in ends.items():
        if os.stat(os.path.join(path, name)).st_size < end:
            raise TornError("wrong-size", name)
    check_tree(path)


def is_dcp(path: str) -> bool:
    return any(name == ".metadata" or DCP_FILE.match(name) for name in os.listdir(path))


def dcp_ends(path: str) -> dict[str, int]:
    """Return, by file, the end of the last element that the index of torch.distributed.checkpoint has of it."""
    index = os.path.join(path, ".metadata")
    try:
        with open(index, "rb") as file:
            data = file.read(INDEX_BYTES + 1)
    except FileNotFoundError:
        raise TornError("missing", ".metadata") from None
    if len(data) > INDEX_BYTES:
        return {}
    ends, values = {}, {}  # type: dict[str, int], dict[str, Any]
    key = None
    try:
        for value in pickle_scalars(data):
            if key in ("relative_path", "offset", "length"):
                values[key] = value
                if key == "length":
                    name, end = values["relative_path"], values["offset"] + value
                    ends[name] = max(ends.get(name, 0), end)
            key = value
    except (ValueError, KeyError, TypeError, IndexError):
        raise TornError("invalid", ".metadata") from None
    return ends


def pickled_counts(path: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return the integers that follow these keys in a file of torch.save; {}: it is not readable."""
    found = {}  # type: dict[str, int]
    try:
        with zipfile.ZipFile(path) as archive:
            (member,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if member.file_size > INDEX_BYTES:
                return {}
            key = None
            for value in pickle_scalars(archive.read(member)):
                if key in names and isinstance(value, int):
                    found.setdefault(key, value)
                key = value
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return {}
    return found


def pickle_scalars(data: bytes) -> Iterator[Any]:
    """Yield the texts and numbers of a pickle in their order. Raises ValueError if it is truncated."""
    memo = {}  # type: dict[int, Any]
    last = None
    for op, argument, _ in pickletools.genops(data):
        if op.name == "MEMOIZE":
            memo[len(memo)] = last
            continue
        if op.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = last
            continue
        if op.name in ("GET", "BINGET", "LONG_BINGET"):
            last = memo.get(int(str(argument)))
        elif isinstance(argument, (str, int)) and op.name not in ("PROTO", "FRAME", "GLOBAL"):
            last = argument
        else:
            last = None
            continue
        if last is not None:
            yield last


CHECKS = {
    "transformers": check_transformers,
    "deepspeed": check_deepspeed,
    "torch-dcp": check_dcp,
    "megatron": check_megatron,
}
