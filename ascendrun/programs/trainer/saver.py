"""Checkpoints during training: a copy in host memory, a thread that writes it, all parts or none.

The state is a set of parts, and a part has the ranks that hold it: the common part all of them, a shard those with this
shard. In each directory (one that all see, or one on the disk of each host) the lowest of the ranks that hold a part
writes it. So a model sharded inside each host is whole on the disk of each host. A checkpoint can be resumed from
when some directory has each of its parts; ranks that lack one receive it from a rank that has it.

torch.distributed.checkpoint reads other layouts too, but has neither hashes nor a rule for directories that not all
ranks see, and its files become complete one by one.

Each start claims an epoch of the directories (checkpoint.py), so that an attempt that was replaced, but still runs on a
host without a connection, cannot harm what its successor saves.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text, listed


@dataclass(frozen=True)
class Saved:
    """One attempt to save. `problem` None: it is complete on every node. `is_superseded`: a later attempt of the
    training has the directory."""

    step: int
    path: Path
    seconds: float
    bytes: int
    problem: str | None
    is_superseded: bool = False

    def record(self) -> dict[str, Any]:
        """Return its line of the metrics."""
        if self.problem is not None:
            return {"event": "checkpoint-failed", "step": self.step, "problem": self.problem}
        return {
            "event": "checkpoint",
            "step": self.step,
            "duration_s": round(self.seconds, 3),
            "size_bytes": self.bytes,
            "path": str(self.path),
        }

    def failure(self) -> Text | None:
        """Return why it failed; None: it did not."""
        if self.problem is None:
            return None
        return listed("program.checkpoint-failed", step=self.step, directory=self.path.parent, problem=self.problem)


@dataclass(frozen=True)
class Found:
    """The state to resume from. `common` is the same on every rank. `read` has the tensors of all parts that this rank
    needs."""

    folder: Path
    facts: dict[str, Any]
    common: dict[str, Any]
    read: checkpoint.Read


Key = tuple[int, str]
"""A step, and which save of it."""
Content = dict[str, dict[str, Any]]
"""By name of a part: what it has, in host memory."""
Best = Optional[tuple[int, Mapping[str, Any]]]
"""The step and the state of the best model; None: it is not to be written."""
Failure = tuple[str, bool]
"""Why a rank could not save, and whether a later attempt has the directory."""


class Saver:
    """All ranks' checkpoints in one directory, or in directories of that name on nodes without a shared disk.

    `shards`: (number of different shards of the state, this rank's); `strategy`: what divides it so. `keep_last`: how
    many checkpoints to keep. `on_saved` is called in the training's thread, by `poll` and `wait`. Raises
    SupersededError if a later attempt of this run has started.
    """

    def __init__(
        self,
        here: Runtime,
        parent: Path,
        *,
        shards: tuple[int, int],
        strategy: str = "",
        keep_last: int = 2,
        in_background: bool = True,
        on_saved: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self.here, self.parent, self.keep_last, self.on_saved = here, parent, keep_last, on_saved
        self.shards, self.strategy, self.in_background = shards, strategy, in_background
        self.run_id = here.share(uuid.uuid4().hex[:8])
        holders = here.gather((find_leader(here, parent, self.run_id), shards[1]))
        """Of every rank: the lowest rank that sees the same directory, and its shard."""
        self.leader = holders[here.rank][0]
        self.neighbours = [rank for rank, (leader, _) in enumerate(holders) if leader == self.leader]
        first = {holder: rank for rank, holder in reversed(list(enumerate(holders)))}
        self.parts = [checkpoint.COMMON] if here.rank == self.leader else []
        if shards[0] > 1 and first[holders[here.rank]] == here.rank:
            self.parts.append(self.own_part)
        writers = sorted({*(leader for leader, _ in holders), *(first.values() if shards[0] > 1 else ())})
        self.group = dist.new_group(writers, backend="gloo") if len(writers) > 1 else None
        self.writers = len(writers)
        self.claim = self._claim()
        self.origin: Key = (0, "")
        """The checkpoint of these directories that the training resumed from; step 0: none."""
        self.has_begun = False
        self.count = 0
        self.thread: threading.Thread | None = None
        self.result: Saved | None = None
        if here.rank == self.leader:
            checkpoint.clear_leftovers(parent, epoch=self.claim.number)
        here.at_end.append(self.wait)

    def _claim(self) -> checkpoint.Claim:
        """Claim the next epoch of all directories, the same number in each."""
        number = 0
        while True:
            number = max(number, *self.here.gather(checkpoint.newest_epoch(self.parent) + 1))
            claim = checkpoint.Claim(self.parent, number, self.run_id, os.environ.get("ASCENDRUN_RUN_ID", ""))
            is_late, is_taken = claim.is_late(), False
            if self.here.rank == self.leader and not is_late:
                try:
                    is_taken = not claim.take()
                except OSError:
                    pass  # find_leader reported it; the first save fails
            answers = self.here.gather((is_late, is_taken))
            if any(late for late, _ in answers):
                raise checkpoint.SupersededError(self.parent)
            if not any(taken for _, taken in answers):
                return claim

    @property
    def own_part(self) -> str:
        return f"shard-{self.shards[1]:05d}.pt"

    def save(
        self,
        step: int,
        common: Mapping[str, Any],
        own: Mapping[str, Any],
        *,
        facts: Mapping[str, Any],
        best: Best = None,
    ) -> None:
        """Wait for the previous save, copy the state and return; the copy is written during the training.

        `best`: (step, state) of the best model so far if it is not saved yet; written first, because the
        checkpoint names it.
        """
        self.wait()
        self.count += 1
        if not self.parts:
            return
        content = {checkpoint.COMMON: common, self.own_part: own}
        parts = tree_map_only(torch.Tensor, to_host, {name: content[name] for name in self.parts})
        write = partial(self._write, step, parts, dict(facts), best if self.here.is_first else None)
        if not self.in_background:
            write()
            self.poll()
            return
        self.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self.thread.start()

    def poll(self) -> Saved | None:
        """Return the result of the last save; None: still writing, or already returned."""
        if self.thread is not None and self.thread.is_alive():
            return None
        self.thread = None
        saved, self.result = self.result, None
        if saved is not None:
            self.on_saved(saved)
        return saved

    def wait(self) -> None:
        """Wait until no write is in progress."""
        if self.thread is not None:
            self.thread.join()
        self.poll()

    # --- the writing thread ---

    def _write(self, step: int, parts: Content, facts: dict[str, Any], best: Best) -> None:
        started_s = time.monotonic()
        path = self.parent / checkpoint.folder_name("step", step, self.claim.number)
        size, problem, is_superseded = 0, None, False
        try:
            size, problem = self._write_parts(step, parts, facts, best)
            if problem is None and self.here.rank == self.leader:
                kept = facts.get("best_step")
                self.claim.check()
                checkpoint.prune(
                    self.parent,
                    newest=step,
                    keep=self.keep_last,
                    best_steps=() if kept is None else (kept,),
                    epoch=self.claim.number,
                )
        except Exception as error:  # any error: the thread ends here, and the training must receive the reason
            problem, is_superseded = f"{type(error).__name__}: {error}", isinstance(error, checkpoint.SupersededError)
        self.result = Saved(step, path, time.monotonic() - started_s, size, problem, is_superseded)

    def _write_parts(self, step: int, parts: Content, facts: dict[str, Any], best: Best) -> tuple[int, str | None]:
        """Return (bytes of all parts, why a rank failed or None). No rank that writes returns before all have
        reported. Raises SupersededError on all of them."""
        token, claim, leads = f"{self.run_id}-{self.count}", self.claim, self.here.rank == self.leader
        marks: dict[str, checkpoint.Fingerprint] = {}
        failure: Failure | None = None
        fresh: Path | None = None
        try:
            if best is not None:
                checkpoint.save(self.parent, "best", *best, facts=facts, claim=claim)
            fresh = checkpoint.open_fresh(self.parent, "step", step, token, claim=claim)
            marks = {name: checkpoint.write_part(fresh, name, content) for name, content in parts.items()}
        except Exception as error:  # sent to all ranks below: no rank may wait for this rank's part
            failure = self._failure(error)
        reports = self._gather((self.leader, marks, failure))
        failures = [each for _, _, each in reports if each is not None]
        every = {name: mark for _, theirs, _ in reports for name, mark in theirs.items()}
        if fresh is not None and not failures and leads:
            mine: dict[str, checkpoint.Fingerprint] = {}
            for leader, theirs, _ in reports:
                mine.update(theirs if leader == self.leader else {})
            try:
                if not self.has_begun:
                    claim.check()
                    claim.begin(*self.origin)
                    self.has_begun = True
                facts, found = {**facts, "save": token}, {**every, **mine}
                checkpoint.commit(fresh, "step", step, found, here=list(mine), facts=facts, claim=claim)
            except Exception as error:  # see above
                failures = [self._failure(error)]
        failures = [each for theirs in self._gather(failures) for each in theirs]
        if fresh is not None and failures and leads:
            shutil.rmtree(fresh, ignore_errors=True)
        if any(is_superseded for _, is_superseded in failures):
            raise checkpoint.SupersededError(self.parent)
        return sum(mark["bytes"] for mark in every.values()), failures[0][0] if failures else None

    def _failure(self, error: Exception) -> Failure:
        return f"rank {self.here.rank}: {describe(error)}", isinstance(error, checkpoint.SupersededError)

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.writers
        dist.all_gather_object(values, value, group=self.group)
        return values

    # --- resume ---

    def find(self, place: Path | None = None) -> Found | None:
        """Return the newest checkpoint of which every part is somewhere, the same on every rank; None: not found.

        `place`: a checkpoint, or a directory of them, to read instead of this run's.
        """
        mine = self._candidates(place or self.parent)
        while True:
            offers = self.here.gather({key: (names, parts) for key, (_, names, parts) in mine.items()})
            usable = []
            for key in {key for offer in offers for key in offer}:
                there = [offer[key] for offer in offers if key in offer]
                if set().union(*(names for names, _ in there)) >= there[0][1]:
                    usable.append(key)
            if not usable:
                self._report_none([[step for step, _ in sorted(offer)] for offer in offers])
                return None
            choice = max(usable)
            torn = self.here.gather(choice in mine and self._torn(*mine[choice][:2]))
            if not any(torn):
                return self._read(choice, mine, [offer.get(choice, (set(), set()))[0] for offer in offers])
            if any(torn[rank] for rank in self.neighbours):
                mine.pop(choice, None)

    def _report_none(self, offers: list[list[int]]) -> None:
        """Report checkpoints that cannot be resumed from, before training restarts from step 0."""
        if any(offers):
            none = listed("program.rank-no-steps")
            have = [
                listed(
                    "program.rank-has", rank=rank, steps=listed("program.rank-steps", steps=steps) if steps else none
                )
                for rank, steps in enumerate(offers)
            ]
            self.here.log(listed("program.no-complete-checkpoint", have=have))

    def _candidates(self, place: Path) -> dict[Key, tuple[Path, set[str], set[str]]]:
        """Return this rank's checkpoints with valid file sizes: directory, parts in it, all parts."""
        found: dict[Key, tuple[Path, set[str], set[str]]] = {}
        is_one = (place / checkpoint.MANIFEST).is_file()
        line = {} if is_one else checkpoint.starts(place)
        skipped = set_aside() if place == self.parent else set()
        for step, folder in checkpoint.directories(place.parent if is_one else place, "step"):
            if is_one and folder.name != place.name:
                continue
            if step in skipped:
                problem: Text | None = listed("program.set-aside")
            elif not checkpoint.is_on_line(checkpoint.epoch_of(folder.name), step, line):
                problem = listed("program.replaced-attempt")
            else:
                problem = checkpoint.fault(folder, hashed=())
            if problem is not None:
                if self.here.rank == self.leader:
                    checkpoint.log_skipped(folder, problem)
                continue
            manifest = checkpoint.read_manifest(folder)
            key = (step, str(manifest["facts"].get("save", "")))
            found[key] = folder, set(manifest["here"]), set(manifest["parts"])
        return found

    def _torn(self, folder: Path, names: set[str]) -> bool:
        """Check this rank's share of the parts in a directory; return whether any is invalid. Print problems."""
        number = self.neighbours.index(self.here.rank)
        problem = checkpoint.fault(folder, hashed=sorted(names)[number :: len(self.neighbours)])
        if problem is not None:
            checkpoint.log_skipped(folder, problem)
        return problem is not None

    def _read(self, choice: Key, mine: dict[Key, tuple[Path, set[str], set[str]]], names: list[set[str]]) -> Found:
        """Read a checkpoint. `names`: the parts that each rank has. A rank reads its own part; where the layout is
        another, or some rank lacks its part, all parts, those that it lacks from a rank that has them."""
        folder = mine[choice][0] if choice in mine else None
        source = next(rank for rank, each in enumerate(names) if checkpoint.COMMON in each)
        content: Any = None
        if self.here.rank == source:
            assert folder is not None
            content = [str(folder), checkpoint.facts_of(folder), checkpoint.load(folder)]
        path, facts, common = self.here.share(content, source=source)
        every = sorted(set().union(*names) - {checkpoint.COMMON})
        is_same = (facts.get("shards", 1), facts.get("strategy", "")) == (self.shards[0], self.strategy)
        if is_same and all(self.here.gather(not every or self.own_part in names[self.here.rank])):
            every = [self.own_part] if every else []
        parts: dict[str, Any] = {}
        for name in every:
            is_everywhere = name == self.own_part and len(every) == 1 or all(name in each for each in names)
            owner = next(rank for rank, each in enumerate(names) if name in each)
            if is_everywhere or self.here.rank == owner:
                assert folder is not None
                parts[name] = checkpoint.load(folder, name, is_mapped=True)
            if not is_everywhere:
                parts[name] = self.here.share(parts.get(name), source=owner)
        read = checkpoint.reader([common["pieces"], *(part["pieces"] for part in parts.values())])
        return Found(Path(path), facts, common, read)

    def read_best(self, step: int, parent: Path) -> dict[str, Any] | None:
        """Return the best model of that step on every rank, from the first rank with a complete copy; None: no copy."""
        folder = checkpoint.best_folder(parent, step)
        has_it = self.here.gather(folder.exists() and checkpoint.fault(folder) is None)
        if True not in has_it:
            return None
        source = has_it.index(True)
        return self.here.share(checkpoint.load(folder) if self.here.rank == source else None, source=source)


def set_aside() -> set[int]:
    """Return the steps from which the launcher wants no resume: attempts that began there failed repeatedly."""
    return {int(each) for each in os.environ.get("ASCENDRUN_RESUME_SKIP", "").split(",") if each.strip().isdigit()}


def describe(error: Exception) -> str:
    """Describe an error. torch wraps the error of a full disk; the original is its context."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return f"{type(cause).__name__}: {cause}"


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory that training does not change."""
    host = tensor.detach().to("cpu")
    return host.clone() if host.data_ptr() == tensor.data_ptr() else host


def find_leader(here: Runtime, parent: Path, token: str) -> int:
    """Return the lowest rank that sees the same directory as this rank: itself if disks are not shared."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f".seen-{token}-{here.rank}.tmp").touch()
    except OSError as error:
        print(listed("program.cannot-save", directory=parent, error=error), file=sys.stderr, flush=True)
    here.barrier()
    seen = [rank for rank in range(here.rank) if os.path.exists(parent / f".seen-{token}-{rank}.tmp")]
    here.barrier()
    try:
        os.unlink(parent / f".seen-{token}-{here.rank}.tmp")
    except OSError:
        pass  # it is only a marker; clear_leftovers removes it
    return min(seen, default=here.rank)
