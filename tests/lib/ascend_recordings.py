"""The recordings of tests/recordings/ascend: each folder is a kind of output.

    python -m tests.lib.ascend_recordings ascendrun-verify.tar.gz SITE

makes recordings of the outputs in an archive of `ascendrun verify`, each different one once, as SITE-1, SITE-2, ….
"""

import dataclasses
import json
import sys
import tarfile
from pathlib import Path

from ascendrun.ascend.kinds import PARSERS
from ascendrun.text import Text

FOLDER = Path(__file__).resolve().parents[1] / "recordings" / "ascend"

RECORDINGS = sorted(FOLDER.glob("*/*.txt"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in RECORDINGS]


def read(path):
    return path.read_text(encoding="utf-8")


def parse(path):
    return PARSERS[path.parent.name](read(path))


def npu_ids(info):
    """The NPUs of the table, each once, in its order."""
    return tuple(dict.fromkeys(chip.npu_id for chip in info.chips))


def plain(value):
    """A reading as JSON can hold it."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Text):
        return value.key
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def as_json(value):
    return json.dumps(plain(value), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def record(archive, site, folder=FOLDER):
    """Write the recordings of an archive with their meanings, for review; return their paths."""
    written = []
    known = {(path.parent.name, read(path)) for path in folder.glob("*/*.txt")}
    with tarfile.open(archive) as tar:
        for member in tar:
            kind, _, name = member.name.partition("/recordings/")[2].partition("/")
            if kind not in PARSERS or "/" in name:
                continue
            text = tar.extractfile(member).read().decode()
            if (kind, text) in known:
                continue
            known.add((kind, text))
            (folder / kind).mkdir(parents=True, exist_ok=True)
            number = 1 + len(list((folder / kind).glob(f"{site}-*.txt")))
            path = folder / kind / f"{site}-{number}.txt"
            path.write_text(text, encoding="utf-8")
            path.with_suffix(".json").write_text(as_json(PARSERS[kind](text)), encoding="utf-8")
            written.append(path)
    return written


if __name__ == "__main__":
    for one in record(sys.argv[1], sys.argv[2]):
        print(one)
