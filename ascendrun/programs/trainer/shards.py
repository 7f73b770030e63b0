"""Samples as tokens on disk: encoded in parallel, once per file system, and mapped into memory by all ranks of a host.

A directory is named by the hash of all that shapes its content. It has, for every SHARD_ROWS rows of the source,

    00000.tokens   uint16 or uint32      00000.rows     uint64, starts of the rows and the last end, in tokens
    00000.labels   1 bit a token: trained on or not     00000.groups   uint8, 0: none

little-endian, and manifest.json. A row that has nothing to train on is kept with no tokens: numbers stay those of
the source. `Rows` makes rows of one length from documents of any, by an index that is made once on disk.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import MANIFEST, replace_json, replace_text, replacing
from ascendrun.programs.trainer.data import IGNORED, Unit, become_worker
from ascendrun.text import Text, listed

FORMAT = 1
SHARD_ROWS = 4096
POLL_S, REPORT_S = 0.2, 5.0
Array = Any
EncodedRows = Sequence[tuple[Any, Any]]
"""The tokens of each row, and whether each is trained on: sequences or arrays."""
Encoder = Callable[[Sequence[Any]], EncodedRows]
"""Encodes some rows of the source. Worker processes get a copy of it."""


@dataclass(frozen=True)
class Encoded:
    """One sample: sequences of numbers. `labels`: the token where it is trained on, else IGNORED. `level`: an index of
    the program."""

    ids: Any
    labels: Any
    level: int

    @property
    def learned(self) -> int:
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True)
class Source:
    """Rows to encode. `groups`: the name of each row's group, None: it has none. `vocabulary`: number of tokens."""

    rows: Sequence[Any]
    groups: Sequence[str | None]
    encoder: Encoder
    vocabulary: int


class Tokens(Sequence[Encoded]):
    """Samples of a directory, by number. Only offsets, lengths and levels are in this process's own memory.

    While they are in use the directory is locked, so that `ascendrun prune` leaves it. Raises FileNotFoundError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = open(folder / MANIFEST, "rb")
        with contextlib.suppress(OSError):  # a disk without locks, or one that this user may only read
            fcntl.flock(self.lock, fcntl.LOCK_SH)
            os.utime(folder / MANIFEST)
        self.manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        self.names: list[str] = self.manifest["groups"]
        self.parts = [
            {kind: mapped(folder / f"{shard['name']}.{kind}", dtype) for kind, dtype in kinds(self.manifest).items()}
            for shard in self.manifest["shards"]
        ]
        self.levels = np.concatenate([np.asarray(part["groups"]) for part in self.parts])
        self.lengths = np.concatenate([np.diff(part["rows"]).astype(np.int32) for part in self.parts])
        self.numbers = np.arange(len(self.lengths), dtype=np.int32)

    def select(self, numbers: Array, levels: Array | None = None) -> Tokens:
        """Return these samples only, in this order. `levels`: of each number of the new samples; None: unchanged."""
        found: Tokens = object.__new__(Tokens)
        chosen = {"numbers": self.numbers[numbers], "lengths": self.lengths[numbers]}
        found.__dict__.update(self.__dict__, **chosen, levels=self.levels[numbers] if levels is None else levels)
        return found

    def __reduce__(self) -> Any:
        return reopened, (self.folder, self.numbers, self.levels)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        shard, row = divmod(int(self.numbers[number]), SHARD_ROWS)
        part = self.parts[shard]
        start, end = int(part["rows"][row]), int(part["rows"][row + 1])
        ids = part["tokens"][start:end].astype(np.int64)
        bits = np.unpackbits(part["labels"][start // 8 : -(-end // 8)])[start % 8 :][: end - start]
        return Encoded(ids, np.where(bits, ids, IGNORED), int(self.levels[number]))


@cache
def opened(folder: Path) -> Tokens:
    return Tokens(folder)


def reopened(folder: Path, numbers: Array, levels: Array) -> Tokens:
    """Return such samples in another process, which maps the files itself."""
    return opened(folder).select(numbers, levels)


def kinds(manifest: dict[str, Any]) -> dict[str, str]:
    return {"tokens": manifest["dtype"], "labels": "<u1", "rows": "<u8", "groups": "<u1"}


def mapped(file: Path, dtype: str) -> Array:
    """Map a file; an empty one cannot be mapped."""
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


def lengths_of(samples: Sequence[Encoded]) -> Array:
    return samples.lengths if isinstance(samples, Tokens) else np.array([len(each.ids) for each in samples])


def levels_of(samples: Sequence[Encoded]) -> Array:
    return samples.levels if isinstance(samples, Tokens) else np.array([each.level for each in samples])


# --- building ---


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascendrun" / "data"


def key_of(*marks: object) -> str:
    """Return the name of the directory for everything that shapes its content."""
    return hashlib.sha256("\0".join(map(str, (FORMAT, SHARD_ROWS, *marks))).encode()).hexdigest()[:32]


def is_built(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_or_build(
    folder: Path, make: Callable[[], Source], *, context: BaseContext | None = None, log: Callable[[Text], None] = print
) -> Tokens:
    """Open the directory. If it is missing, this process builds it, or waits for the process of any host that does.

    `make`: reads the source; called by the builder only. A builder that is killed gives up its lock, and the next one
    continues with the shards that are complete. Raises what `make` and the encoder raise, and OSError.
    """
    while True:
        once(folder, lambda: is_built(folder), lambda: build(folder, make(), context=context, log=log))
        with contextlib.suppress(FileNotFoundError):  # removed in between
            return Tokens(folder)


def once(path: Path, is_there: Callable[[], bool], make: Callable[[], None]) -> None:
    """Make what is missing in one process of all that call this; the others wait."""
    while not is_there():
        with locked(path) as is_mine:
            if is_mine and not is_there():
                make()
            elif not is_mine:
                time.sleep(POLL_S)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Yield whether this process may build. Without locks in the file system every process may: all write the same."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{folder.name}.lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True


def build(folder: Path, source: Source, *, context: BaseContext | None, log: Callable[[Text], None]) -> None:
    """Encode the missing shards in worker processes, then rename the directory to its final name."""
    fresh, began_s = folder.with_name(f"{folder.name}.building"), time.monotonic()
    fresh.mkdir(exist_ok=True)
    names = sorted({group for group in source.groups if group is not None})
    numbers: dict[str | None, int] = {None: 0, **{name: number for number, name in enumerate(names, start=1)}}
    dtype = "<u2" if source.vocabulary <= 1 << 16 else "<u4"
    starts = range(0, max(1, len(source.rows)), SHARD_ROWS)
    missing = [start for start in starts if not is_complete(fresh, name_of(start))]
    workers = min(len(os.sched_getaffinity(0)), len(missing))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here the processes are the parallelism
    with pool_of(workers, source.encoder, context) as pool:
        futures = {}
        for start in missing:
            rows = slice(start, start + SHARD_ROWS)
            groups = np.array([numbers[group] for group in source.groups[rows]], dtype="<u1")
            future = pool.submit(write_shard, fresh, name_of(start), source.rows[rows], groups, dtype)
            futures[future] = len(groups)
        done, reported_s = 0, began_s
        for future in as_completed(futures):
            future.result()
            done += futures[future]
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                rate = done / (reported_s - began_s)
                log(listed("program.encoding", done=done, rate=rate))
    shards = [json.loads((fresh / f"{name_of(start)}.json").read_text()) for start in starts]
    totals = {kind: sum(shard[kind] for shard in shards) for kind in ("rows", "tokens", "learned")}
    manifest = {"format": FORMAT, "dtype": dtype, "groups": names, **totals, "shards": shards}
    replace_json(fresh / MANIFEST, manifest)
    try:
        os.rename(fresh, folder)
    except OSError:  # another process without locks was faster
        if not is_built(folder):
            raise
        shutil.rmtree(fresh, ignore_errors=True)
    log(
        listed(
            "program.encoded",
            rows=totals["rows"],
            tokens=totals["tokens"],
            seconds=time.monotonic() - began_s,
            directory=folder,
        )
    )


def pool_of(workers: int, encoder: Encoder, context: BaseContext | None) -> Executor:
    if workers < 2:
        return ThreadPoolExecutor(1, initializer=use_encoder, initargs=(encoder,))
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(encoder,))


_ENCODER: list[Encoder] = []


def use_encoder(encoder: Encoder) -> None:
    _ENCODER[:] = [encoder]


def start_worker(encoder: Encoder) -> None:
    become_worker()
    use_encoder(encoder)


def name_of(start: int) -> str:
    return f"{start // SHARD_ROWS:05d}"


def is_complete(fresh: Path, name: str) -> bool:
    """Return whether a shard was written to its end. Its facts are written last."""
    try:
        facts = json.loads((fresh / f"{name}.json").read_text())
        return all((fresh / f"{name}.{kind}").stat().st_size == size for kind, size in facts["bytes"].items())
    except (OSError, ValueError):
        return False


def write_shard(fresh: Path, name: str, rows: Sequence[Any], groups: Array, dtype: str) -> None:
    encoded = _ENCODER[0](rows)
    lengths = [len(ids) for ids, _ in encoded]
    arrays = {
        "tokens": np.concatenate([np.empty(0, dtype), *(np.asarray(ids, dtype=dtype) for ids, _ in encoded)]),
        "labels": np.packbits(np.concatenate([np.empty(0, bool), *(np.asarray(bits, bool) for _, bits in encoded)])),
        "rows": np.cumsum([0, *lengths], dtype="<u8"),
        "groups": groups,
    }
    facts: dict[str, Any] = {"name": name, "rows": len(lengths), "tokens": sum(lengths)}
    facts["learned"] = int(sum(np.count_nonzero(bits[1:]) for _, bits in encoded))
    facts["bytes"], facts["sha256"] = {}, {}
    for kind, array in arrays.items():
        data = array.tobytes()
        with replacing(fresh / f"{name}.{kind}") as path, open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        facts["bytes"][kind], facts["sha256"][kind] = len(data), hashlib.sha256(data).hexdigest()
    replace_text(fresh / f"{name}.json", json.dumps(facts))


# --- what is there ---


@dataclass(frozen=True)
class Held:
    """One directory of a cache. `age_s`: since its last use."""

    key: str
    rows: int
    bytes: int
    age_s: float


def directories(cache: Path, *, now_s: float) -> list[Held]:
    """Return the complete directories of a cache, the newest first."""
    found = []
    for file in cache.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # removed meanwhile, or not ours
            size = sum(each.stat().st_size for each in file.parent.iterdir())
            rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
            found.append(Held(file.parent.name, rows, size, now_s - file.stat().st_mtime))
    return sorted(found, key=lambda held: held.age_s)


WAITING = 1000
"""Documents that are looked at for the one that fits best."""


class Rows:
    """Plan of rows of `seq_len` + 1 tokens: inputs are all but the last token, targets all but the first.

    The largest waiting document that fits into the rest of a row comes next. If none fits, `crop` fills the rest with
    the beginning of the shortest, whose end is not used; without it the rest is padding. The rows follow from the
    documents alone, their order from the seed and the epoch: `units(step)` needs no saved state.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, batch_size: int, seed: int, crop: bool = True) -> None:
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.pieces = index_of(tokens, seq_len + 1, crop=crop)
        self.count = int(self.pieces[-1, 0]) + 1 if len(self.pieces) else 0
        if self.count < batch_size:
            raise InvalidDataError(listed("program.few-rows", rows=self.count, length=seq_len, batch=batch_size))
        self.steps_per_epoch = self.count // batch_size
        self._order: tuple[int, Array] = (-1, None)

    def units(self, step: int) -> Sequence[Unit]:
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._order[0]:
            order = np.random.default_rng([self.seed, 3, epoch]).permutation(self.count)
            self._order = epoch, order
        start = place * self.batch_size
        return [(int(row),) for row in self._order[1][start : start + self.batch_size]]

    def read(self, units: Sequence[Unit]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, labels): int64, rows x (seq_len + 1). The label of padding, and of what is not trained on, is
        IGNORED."""
        numbers = [number for unit in units for number in unit]
        ids = np.zeros((len(numbers), self.seq_len + 1), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, number in enumerate(numbers):
            start = 0
            for document, take in self.documents(number):
                sample, part = self.tokens[document], slice(start, start + take)
                ids[row, part], labels[row, part] = sample.ids[:take], sample.labels[:take]
                start += take
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def documents(self, row: int) -> list[tuple[int, int]]:
        """Return (document, tokens taken from its beginning) of a row, in order."""
        start, end = np.searchsorted(self.pieces[:, 0], [row, row + 1])
        return [(int(document), int(take)) for _, document, take in self.pieces[start:end]]


def index_of(tokens: Tokens, size: int, *, crop: bool) -> Array:
    """Return (row, document, tokens taken) of every piece, mapped from the file that the first process here made."""
    mark = hashlib.sha256(tokens.numbers.tobytes()).hexdigest()[:16]
    path = tokens.folder / f"rows-{size}-{'crop' if crop else 'pad'}-{mark}.npy"
    once(path, path.is_file, lambda: write_index(path, tokens.lengths, size, crop=crop))
    return np.load(path, mmap_mode="r")


def write_index(path: Path, lengths: Array, size: int, *, crop: bool) -> None:
    pieces = np.array(list(best_fit(lengths, size, crop=crop)), dtype=np.int32).reshape(-1, 3)
    with replacing(path) as fresh, open(fresh, "wb") as file:
        np.save(file, pieces)


def best_fit(lengths: Any, size: int, *, crop: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of full rows, and of rows with padding if not `crop`; a longer document is cut to a row."""
    coming = iter([(min(int(length), size), number) for number, length in enumerate(lengths) if length])
    waiting = sorted(islice(coming, WAITING))
    row: list[tuple[int, int]] = []
    number, room = 0, size
    while waiting:
        at = bisect.bisect_right(waiting, (room, len(lengths))) - 1
        if at < 0 and not crop or room == 0:
            yield from ((number, document, take) for document, take in row)
            number, room, row = number + 1, size, []
            continue
        length, document = waiting.pop(max(0, at))
        take = min(length, room)
        row.append((document, take))
        room -= take
        following = next(coming, None)
        if following is not None:
            bisect.insort(waiting, following)
    if room == 0 or row and not crop:
        yield from ((number, document, take) for document, take in row)
