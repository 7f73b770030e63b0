"""Files of a training on this node, for `ascendrun plan`: models by their headers, data by its rows. No torch needed.

Each path becomes one of these; texts of users are not sent, only their forms and lengths:

    {"missing": True} | {"error": text}
    {"kind": "folder", "names": […], "texts", "saved"}
    {"kind": "model", "names", "config", "config_error", "organisms", "tokenizer", "files", "tensors", "not_on_disk"}
    {"kind": "prepared", "facts"}                         the output of mode prepare of the program trajectory
    {"kind": "data", "files": [{"name", "bytes", "form", …}], "more"}    of a directory also "names", "texts"

`files` of a model: {name: {"bytes", "expected" | "error"}}, by the header of each file. `tensors`: {name with * for
numbers: [dtype, shape, count]}. A data file of up to WHOLE_BYTES is read whole (`whole`), of a larger one the start.
`tasks` of it: {kind of a task: number of the first row that is of another kind}. `texts`: number of .txt files. A
Parquet file has the names of its columns (`fields`) and its rows. `saved`: what the newest checkpoint in the directory
keeps of the training that it belongs to, {"name", "identity"}; None: it has none of a bundled program.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import re
import time
import zlib
from collections import Counter

from ascendrun.facts import headers
from ascendrun.facts.proteins import (
    COLUMNS,
    LINES,
    PROTEIN_FILES,
    TABLES,
    Protein,
    form_of,
    has_protein,
    odd_letters,
    read_object,
    read_proteins,
    residues_of,
)
from ascendrun.facts.proteins import FASTA as FASTA_FORMS
from ascendrun.facts.rows import ROW_KINDS, Fault, UnusableRowError, parse_rows, read_conversation
from ascendrun.node.agent.attempt.checkpoints import places_in
from ascendrun.node.files import to_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping

    Raw = Dict[str, Any]

WHOLE_BYTES, START_BYTES = 32 << 20, 1 << 20
MOST_FILES, MOST_NAMES, ROWS_SHOWN, VALUES = 20, 200, 5, 300
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
FASTA = tuple(f"{form}{packed}" for form in (*FASTA_FORMS, ".faa") for packed in ("", ".gz"))
DATA = (".json", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet", *FASTA)
SEPARATORS = ",;\t|"
ROWS_SENT, ORGANISMS_SENT, LONGEST_SENT = 200, 200, 5
ROWS_BETWEEN_LOOKS = 1024


def examine(item: Raw, deadline: float) -> Raw:
    """Return {"paths": {path: what is there}}."""
    return {"paths": {path: _examine_path(path, deadline) for path in item["paths"]}}


def _examine_path(path: str, deadline: float) -> Raw:
    try:
        if os.path.isdir(to_bytes(path)):
            return _folder(path, deadline)
        size = os.stat(to_bytes(path)).st_size
        return {"kind": "data", "files": [_data_file(path, size, deadline)], "more": 0}
    except (FileNotFoundError, NotADirectoryError):
        return {"missing": True}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _folder(path: str, deadline: float) -> Raw:
    names = sorted(os.listdir(path))
    if "prepared.json" in names:
        with open(os.path.join(path, "prepared.json"), encoding="utf-8") as file:
            try:
                return {"kind": "prepared", "facts": json.load(file)}
            except ValueError as error:
                return {"error": str(error)}
    if any(name in names for name in ("config.json", "tokenizer.json", "adapter_config.json")) or any(
        name.endswith(".safetensors") for name in names
    ):
        return _model(path, names, deadline)
    data = [name for name in names if name.endswith(DATA) and not name.startswith(".")]
    if data:
        files = []
        for name in data[:MOST_FILES]:
            full = os.path.join(path, name)
            files.append(_data_file(full, os.stat(to_bytes(full)).st_size, deadline))
        found = {"kind": "data", "files": files, "more": len(data) - len(files), "names": data[:MOST_NAMES]}
    else:
        found = {"kind": "folder", "names": names[:MOST_NAMES], "saved": _saved(path)}
    return {**found, "texts": sum(name.endswith(".txt") and not name.startswith(".") for name in names)}


def _saved(path: str) -> Raw | None:
    for place in places_in(path):
        manifest, _ = _json(os.path.join(path, place.name), "manifest.json", ["manifest.json"])
        facts = manifest.get("facts") if isinstance(manifest, dict) else None
        if place.format == "ascendrun" and isinstance(facts, dict) and isinstance(facts.get("identity"), dict):
            return {"name": place.name, "identity": facts["identity"]}
    return None


# --- models ---


def _model(path: str, names: list[str], deadline: float) -> Raw:
    raw: Raw = {"kind": "model", "names": names[:MOST_NAMES], "files": {}, "tensors": {}, "not_on_disk": []}
    raw["config"], raw["config_error"] = _json(path, "config.json", names)
    raw["organisms"], _ = _json(path, "organisms.json", names)
    tokenizer, error = _json(path, "tokenizer.json", names)
    settings, _ = _json(path, "tokenizer_config.json", names)
    vocabulary = (tokenizer or {}).get("model", {}).get("vocab") if isinstance(tokenizer, dict) else None
    raw["tokenizer"] = {
        "found": any(name in names for name in ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")),
        "error": error,
        "size": len(vocabulary) if vocabulary else None,
        **_tokens(tokenizer, vocabulary),
        "has_template": "chat_template.jinja" in names or bool((settings or {}).get("chat_template")),
    }
    index, error = _json(path, "model.safetensors.index.json", names)
    found = dict((index or {}).get("weight_map") or {}) if isinstance(index, dict) else {}
    if error:
        raw["index_error"] = error
    raw["not_on_disk"] = sorted(set(found.values()) - set(names))
    wanted = set(found.values()) if found else {name for name in names if name.endswith(".safetensors")}
    counts: dict[str, list[Any]] = {}
    seen = set()
    for name in sorted(wanted & set(names)):
        if time.monotonic() > deadline - 0.5:
            raw["files"][name] = {"error": "not read in time", "late": True}
            continue
        raw["files"][name], tensors = _header(os.path.join(path, name))
        for tensor, (dtype, shape) in tensors.items():
            seen.add(tensor)
            key = NUMBER.sub("*", tensor)
            counts.setdefault(key, [dtype, shape, 0])[2] += 1
    raw["tensors"] = counts
    raw["not_in_files"] = sorted(
        name for name, file in found.items() if "expected" in raw["files"].get(file, {}) and name not in seen
    )[:ROWS_SHOWN]
    return raw


def _tokens(tokenizer: Any, vocabulary: Any) -> Raw:
    """Return the tokens next to the vocabulary, how many there are in all, the highest number of one and 1 (`ids`), and
    a mark of the content."""
    if not isinstance(tokenizer, dict):
        return {}
    entries = tokenizer.get("added_tokens")
    added = (
        [str(each.get("content")) for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    )
    known = vocabulary if isinstance(vocabulary, dict) else {}
    numbers = [each for each in known.values() if isinstance(each, int)] or [len(vocabulary or ()) - 1]
    for each in entries if isinstance(entries, list) else ():
        if isinstance(each, dict) and isinstance(each.get("id"), int):
            numbers.append(each["id"])
    return {
        "added": added[:MOST_NAMES],
        "tokens": len(vocabulary) + sum(each not in known for each in added) if vocabulary else None,
        "ids": max(numbers) + 1,
        "mark": hashlib.sha256(json.dumps(tokenizer, sort_keys=True).encode()).hexdigest()[:16],
    }


def _json(folder: str, name: str, names: list[str]) -> tuple[Any, str | None]:
    """Return (the content, why it is invalid); (None, None): no such file."""
    if name not in names:
        return None, None
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return json.load(file), None
    except (OSError, ValueError) as error:
        return None, str(error)


def _header(path: str) -> tuple[Raw, Mapping[str, Any]]:
    """Return (size on disk and by the header, or the error; dtype and shape of the tensors)."""
    size = 0
    try:
        size = os.stat(to_bytes(path)).st_size
        header = headers.read_safetensors(to_bytes(path))
        return {"bytes": size, "expected": header.file_bytes}, header.tensors
    except OSError as error:
        return {"bytes": 0, "error": error.strerror or str(error)}, {}
    except ValueError as error:
        return {"bytes": size, "error": str(error)}, {}


# --- data ---


def _data_file(path: str, size: int, deadline: float) -> Raw:
    name = os.path.basename(path)
    raw: Raw = {"name": name, "bytes": size, "form": next((end[1:] for end in DATA if name.endswith(end)), "other")}
    is_packed = name.endswith(".gz")
    is_whole = size <= (START_BYTES * 4 if is_packed else WHOLE_BYTES)
    try:
        opener: Any = gzip.open if is_packed else open
        with opener(to_bytes(path), "rb") as file:
            data = file.read() if is_whole else file.read(START_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raw["error"] = str(error)
        return raw
    raw["whole"] = is_whole
    raw["mark"] = hashlib.sha256(data).hexdigest()[:16]
    if raw["form"] == "parquet":
        try:
            raw.update(headers.read_parquet(to_bytes(path)))
        except (OSError, ValueError) as error:
            raw["error"] = str(error)
        return raw
    if not is_whole:
        data = data[: data.rfind(b"\n") + 1] or data
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not is_whole and error.start > len(data) - 4:  # cut in the middle of a character
            text = data[: error.start].decode("utf-8-sig")
        elif raw["form"].startswith("csv") and b"\0" not in data.split(b"\n", 1)[0]:
            text = data.decode("utf-8-sig", "replace")
        else:
            raw["not_utf8"] = error.start
            return raw
    proteins = _proteins(form_of(name), text, deadline) if form_of(name) in PROTEIN_FILES else None
    if proteins is not None:
        raw["proteins"] = proteins
    if raw["form"].startswith("csv"):
        raw.update(_csv(text, deadline))
    elif name.endswith(FASTA):
        raw["rows"] = text.count("\n>") + text.startswith(">")
    else:
        raw.update(_rows(text, is_whole))
    read = max(1, len(data))
    raw["rows_estimate"] = raw.get("rows", 0) if is_whole else int(raw.get("rows", 0) * size / read)
    return raw


def _csv(text: str, deadline: float) -> Raw:
    """Return the columns with their first values, and how many different values each has."""
    lines = text.splitlines()
    if not lines:
        return {"columns": [], "rows": 0}
    separator = max(SEPARATORS, key=lines[0].count)
    rows = csv.reader((line.replace("\0", "") for line in lines), delimiter=separator)
    columns: list[str] = []
    values: list[list[str]] = []
    different: list[set[str]] = []
    count = 0
    try:
        for row in rows:
            if not columns:
                columns = [name.strip() for name in row]
                values, different = [[] for _ in columns], [set() for _ in columns]
                continue
            if len(row) != len(columns):
                continue
            count += 1
            for at, value in enumerate(row):
                if count <= VALUES:
                    values[at].append(value[:40])
                if len(different[at]) < 1000:
                    different[at].add(value.strip())
            if count % 4096 == 0 and time.monotonic() > deadline - 0.5:
                break
    except csv.Error as error:
        return {"columns": columns, "rows": count, "values": values, "bad_csv": str(error)}
    return {
        "columns": columns,
        "rows": count,
        "values": values,
        "different": [len(each - {""}) for each in different],
        "classes": [sorted(each - {""})[:VALUES] if len(each) <= 40 else None for each in different],
    }


def _rows(text: str, is_whole: bool) -> Raw:
    """Return the number of rows, faults with their places, difficulties, and lengths of the texts."""
    rows, faults, _ = parse_rows(text, is_whole=is_whole)
    tasks = {kind: next((place for place, row in rows if not is_of(row)), None) for kind, is_of in ROW_KINDS.items()}
    counted: Raw = {"rows": len(rows), "chars": 0, "learned_chars": 0, "longest": 0}
    levels: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    ships: set[str] = set()
    forms: Counter[str] = Counter()
    for place, row in rows:
        if isinstance(row, dict) and "text" in row and "instruction" not in row:
            forms["text"] += 1
            labels["" if row.get("label") is None else str(row["label"])] += 1
            if len(ships) < 1000:
                ships.add(str(row.get("ship") or row.get("source_file") or place))
            if isinstance(row["text"], str):
                _count(counted, len(row["text"].split()), 0)
            else:
                faults.append(Fault(place, "text-form"))
            continue
        forms["chat"] += 1
        level = row.get("difficulty") if isinstance(row, dict) else None
        levels["" if level is None else str(level)] += 1
        try:
            turns = read_conversation(row).turns
            replies = sum(len(text) for role, text in turns if role == "assistant")
            _count(counted, sum(len(text) for _, text in turns), replies)
        except UnusableRowError as error:
            faults.append(Fault(place, error.code, error.value, error.number))
    return {
        **counted,
        "faults": faults[:ROWS_SHOWN],
        "levels": dict(levels.most_common(50)),
        "labels": dict(labels.most_common(50)),
        "ships": len(ships),
        "forms": dict(forms),
        "tasks": {kind: place for kind, place in tasks.items() if place is not None},
    }


def _count(counted: Raw, size: int, learned: int) -> None:
    counted["chars"] += size
    counted["learned_chars"] += learned
    counted["longest"] = max(counted["longest"], size)


# --- proteins: the options of the training decide which letters and organisms are right ---


def _proteins(form: str, text: str, deadline: float) -> Raw | None:
    """Return what the proteins of a file are; None: it has none.

    {"count", "odd": [[place, residues with the stop, {letter: [how many, first positions]}]],
    "longest": [[residues with the stop, place]], "organisms": {name: first place}, "lacking": [place]}. `lacking`: rows
    without a protein; "" in `organisms`: no name. Lists end at a limit, and all of it at the deadline.
    """
    if not _has_proteins(form, text):
        return None
    found: Raw = {"count": 0, "odd": [], "longest": [], "organisms": {}, "lacking": []}
    with contextlib.suppress(csv.Error):  # it is a problem of the table
        for protein in read_proteins(form, io.StringIO(text, newline="")):
            if protein.letters is None:
                found["lacking"].append(protein.place)
                continue
            found["count"] += 1
            _add(found, protein, residues_of(protein.letters))
            if found["count"] % ROWS_BETWEEN_LOOKS == 0 and time.monotonic() > deadline - 0.5:
                break
    found["lacking"] = found["lacking"][:ROWS_SENT]
    return found


def _add(found: Raw, protein: Protein, residues: str) -> None:
    size, odd = len(residues), odd_letters(residues)
    if (odd or size == 1) and len(found["odd"]) < ROWS_SENT:
        found["odd"].append([protein.place, size, odd])
    if len(found["longest"]) < LONGEST_SENT or size > found["longest"][-1][0]:
        ordered = sorted([*found["longest"], [size, protein.place]], key=lambda each: -int(each[0]))
        found["longest"] = ordered[:LONGEST_SENT]
    if len(found["organisms"]) < ORGANISMS_SENT:
        found["organisms"].setdefault(protein.organism.strip(), protein.place)


def _has_proteins(form: str, text: str) -> bool:
    first = text.lstrip().split("\n", 1)[0]
    if form in TABLES:
        return any(name.strip().lower() in COLUMNS["protein"] for name in next(csv.reader([first]), []))
    return form not in LINES or has_protein(read_object(first))
