"""Checkpoints during training: a copy in host memory, a thread that writes it, all ranks' parts or none."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.task import CannotResumeError
from ascendrun.text import Text


@dataclass(frozen=True)
class Saved:
    """One attempt to save. `problem` None: it is complete on every node."""

    step: int
    path: Path
    seconds: float
    bytes: int
    problem: str | None


@dataclass(frozen=True)
class State:
    """The state of one rank to write, in host memory. `best`: (step, state) of the best model; None: do not write."""

    step: int
    common: dict[str, Any]
    own: dict[str, Any]
    facts: dict[str, Any]
    best: tuple[int, Mapping[str, Any]] | None


@dataclass(frozen=True)
class Found:
    """The state to resume from. `common` is the same on every rank, `own` this rank's part."""

    folder: Path
    facts: dict[str, Any]
    common: dict[str, Any]
    own: dict[str, Any]


class Saver:
    """All ranks' checkpoints in one directory, or in directories of that name on nodes without a shared disk.

    Rank 0 alone writes unsharded state. Of sharded state every rank writes its part; then the ranks notify each
    other over the writers' own group, and the first rank that sees a directory turns it into a checkpoint.
    `keep_last`: number of checkpoints to keep. `on_saved` is called in the training's thread, by `poll` and `wait`.
    """

    def __init__(
        self,
        here: Runtime,
        parent: Path,
        *,
        is_sharded: bool,
        keep_last: int = 2,
        in_background: bool = True,
        on_saved: Callable[[Saved], None] = lambda saved: None,
    ) -> None:
        self.here, self.parent, self.keep_last, self.on_saved = here, parent, keep_last, on_saved
        self.is_sharded = is_sharded and here.control is not None
        self.in_background = in_background
        self.group = dist.new_group(backend="gloo") if self.is_sharded else None
        self.run_id = here.share(uuid.uuid4().hex[:8])
        self.leader = find_leader(here, parent, self.run_id) if self.is_sharded else 0
        self.count = 0
        self.thread: threading.Thread | None = None
        self.result: Saved | None = None
        if here.rank == self.leader:
            checkpoint.clear_leftovers(parent)
        here.at_end.append(self.wait)

    @property
    def writes(self) -> bool:
        return self.is_sharded or self.here.is_first

    def save(
        self,
        step: int,
        common: Mapping[str, Any],
        own: Mapping[str, Any],
        *,
        facts: Mapping[str, Any],
        best: tuple[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Wait for the previous save, copy the state and return; the copy is written during the training.

        `best`: (step, state) of the best model so far if it is not saved yet; written first, because the
        checkpoint names it.
        """
        self.wait()
        self.count += 1
        if not self.writes:
            return
        is_first = self.here.is_first
        state = State(step, to_host(common) if is_first else {}, to_host(own), dict(facts), best if is_first else None)
        if not self.in_background:
            self._write(state)
            self.poll()
            return
        self.thread = threading.Thread(target=self._write, args=(state,), name="checkpoint", daemon=True)
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

    def _write(self, state: State) -> None:
        started_s = time.monotonic()
        path, size, problem = self.parent / checkpoint.folder_name("step", state.step), 0, None
        try:
            size, problem = self._write_parts(state)
            if problem is None and self.here.rank == self.leader:
                best = state.facts.get("best_step")
                best_steps = () if best is None else (best,)
                checkpoint.prune(self.parent, newest=state.step, keep=self.keep_last, best_steps=best_steps)
        except Exception as error:  # any error: the thread ends here, and the training must receive the reason
            problem = f"{type(error).__name__}: {error}"
        self.result = Saved(state.step, path, time.monotonic() - started_s, size, problem)

    def _write_parts(self, state: State) -> tuple[int, str | None]:
        """Return (bytes of all parts, why a rank failed or None). Sharded: no rank returns before all have
        reported."""
        facts, token = state.facts, f"{self.run_id}-{self.count}"
        parts: dict[str, checkpoint.Fingerprint] = {}
        problem: str | None = None
        fresh: Path | None = None
        try:
            if state.best is not None:
                checkpoint.save(self.parent, "best", *state.best, facts=facts)
            fresh = checkpoint.open_fresh(self.parent, "step", state.step, token)
            if self.here.is_first:
                parts[checkpoint.COMMON] = checkpoint.write_part(fresh, checkpoint.COMMON, state.common)
            if self.is_sharded:
                name = checkpoint.own_part(self.here.rank)
                parts[name] = checkpoint.write_part(fresh, name, state.own)
        except Exception as error:  # sent to all ranks below: no rank may wait for this rank's part
            problem = f"rank {self.here.rank}: {describe(error)}"
        reports = self._gather((self.leader, parts, problem))
        problems = [each for _, _, each in reports if each is not None]
        every = {name: mark for _, theirs, _ in reports for name, mark in theirs.items()}
        if fresh is not None and not problems and self.here.rank == self.leader:
            mine = [name for leader, theirs, _ in reports if leader == self.leader for name in theirs]
            try:
                checkpoint.commit(fresh, "step", state.step, every, here=mine, facts={**facts, "save": token})
            except Exception as error:  # see above
                problems = [f"rank {self.here.rank}: {describe(error)}"]
        problems = [each for theirs in self._gather(problems) for each in theirs]
        if fresh is not None and problems and self.here.rank == self.leader:
            shutil.rmtree(fresh, ignore_errors=True)
        return sum(mark["bytes"] for mark in every.values()), problems[0] if problems else None

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.here.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    # --- resume ---

    def find(self, place: Path | None = None) -> Found | None:
        """Return the newest checkpoint that is complete on all required ranks, the same on every rank; None: not found.

        `place`: a checkpoint, or a directory of them, to read instead of this run's. The first rank that has it reads
        the common part and sends it to the others. Raises CannotResumeError when
        the nodes have the parts of other ranks than theirs.
        """
        tried: set[tuple[int, str]] = set()
        while True:
            mine = self._candidates(tried, place or self.parent)
            offers = self.here.gather(list(mine))
            common = [set(each) for each in offers]
            shared = set.intersection(*common) if self.is_sharded else set.union(*common)
            if not shared:
                self._report_none(offers)
                return None
            choice = max(shared)
            tried.add(choice)
            source = next(rank for rank, each in enumerate(offers) if choice in each)
            folder = mine.get(choice)
            if any(self.here.gather(self._torn(folder, is_source=self.here.rank == source))):
                continue
            strangers = [rank for rank in self.here.gather(self._stranger(folder)) if rank is not None]
            if strangers:
                raise CannotResumeError(
                    "program.nodes-reordered",
                    "step {step} in {directory} is complete, but the part of rank {rank} is on another node\n"
                    "hint: list the nodes in the order in which it was written, or set "
                    "--resume_from_checkpoint=never",
                    step=choice[0],
                    directory=self.parent,
                    rank=strangers[0],
                )
            return self._read(folder, source)

    def _report_none(self, offers: list[list[tuple[int, str]]]) -> None:
        """Report checkpoints that cannot be resumed from, before training restarts from step 0."""
        if any(offers):
            have = [
                Text(
                    "program.rank-has",
                    "rank {rank} has {steps}",
                    rank=rank,
                    steps=Text("program.rank-steps", "steps {steps}", steps=[step for step, _ in sorted(each)])
                    if each
                    else Text("program.rank-no-steps", "none"),
                )
                for rank, each in enumerate(offers)
            ]
            self.here.log(
                "program.no-complete-checkpoint",
                "warning: no checkpoint is complete on all nodes; starting from step 0:{have:lines}",
                have=have,
            )

    def _candidates(self, tried: set[tuple[int, str]], place: Path) -> dict[tuple[int, str], Path]:
        """Return this rank's checkpoints with valid file sizes, by (step, which save of it)."""
        found: dict[tuple[int, str], Path] = {}
        is_one = (place / checkpoint.MANIFEST).is_file()
        for step, folder in checkpoint.listed(place.parent if is_one else place, "step"):
            if is_one and folder.name != place.name:
                continue
            facts = checkpoint.fault_free_facts(folder)
            key = (step, str(facts.get("save", "")))
            if key in tried:
                continue
            problem = checkpoint.fault(folder, hashed=())
            if problem is not None:
                if self.here.rank == self.leader and not tried:
                    checkpoint.log_skipped(folder, problem)
                continue
            found[key] = folder
        return found

    def _torn(self, folder: Path | None, *, is_source: bool) -> bool:
        """Check the parts that this rank requires, and return whether any is invalid. Print problems to stderr."""
        if folder is None:
            return self.is_sharded
        names = {checkpoint.COMMON} if is_source else set()
        if self.is_sharded and self._written_by(folder) == self.here.world_size:
            names.add(checkpoint.own_part(self.here.rank))
        problem = checkpoint.fault(folder, hashed=names)
        if problem is not None:
            checkpoint.log_skipped(folder, problem)
        return problem is not None

    def _stranger(self, folder: Path | None) -> int | None:
        """Return this rank if a checkpoint of as many ranks does not have its part here; else None."""
        if not self.is_sharded or folder is None or self._written_by(folder) != self.here.world_size:
            return None
        is_here = checkpoint.own_part(self.here.rank) in checkpoint.read_manifest(folder)["here"]
        return None if is_here else self.here.rank

    @staticmethod
    def _written_by(folder: Path) -> int:
        return sum(name != checkpoint.COMMON for name in checkpoint.read_manifest(folder)["parts"])

    def _read(self, folder: Path | None, source: int) -> Found:
        is_source = self.here.rank == source
        content: Any = None
        if is_source:
            assert folder is not None
            content = [str(folder), checkpoint.facts_of(folder), checkpoint.load(folder)]
        path, facts, common = self.here.share(content, source=source)
        own = {}
        if self.is_sharded and folder is not None and (folder / checkpoint.own_part(self.here.rank)).exists():
            own = checkpoint.load(folder, checkpoint.own_part(self.here.rank))
        return Found(Path(path), facts, common, own)

    def read_best(self, step: int, parent: Path) -> dict[str, Any] | None:
        """Return the best model of that step on every rank, from the first rank with a complete copy; None: no copy."""
        folder = parent / checkpoint.folder_name("best", step)
        has_it = self.here.gather(folder.exists() and checkpoint.fault(folder) is None)
        if True not in has_it:
            return None
        source = has_it.index(True)
        return self.here.share(checkpoint.load(folder) if self.here.rank == source else None, source=source)


def describe(error: Exception) -> str:
    """Describe an error. torch wraps the error of a full disk; the original is its context."""
    cause = error.__context__ if isinstance(error.__context__, OSError) else error
    return f"{type(cause).__name__}: {cause}"


def to_host(value: Any) -> Any:
    """Return a copy in host memory that training does not change."""
    if isinstance(value, torch.Tensor):
        host = value.detach().to("cpu")
        return host.clone() if host.data_ptr() == value.data_ptr() else host
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(item) for item in value)
    return value


def find_leader(here: Runtime, parent: Path, token: str) -> int:
    """Return the lowest rank that sees the same directory as this rank: itself if disks are not shared."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f".seen-{token}-{here.rank}.tmp").touch()
    except OSError as error:
        print(
            Text(
                "program.cannot-save", "cannot write checkpoints to {directory}: {error}", directory=parent, error=error
            ),
            file=sys.stderr,
            flush=True,
        )
    here.barrier()
    seen = [rank for rank in range(here.rank) if os.path.exists(parent / f".seen-{token}-{rank}.tmp")]
    here.barrier()
    try:
        os.unlink(parent / f".seen-{token}-{here.rank}.tmp")
    except OSError:
        pass  # it is only a marker; clear_leftovers removes it
    return min(seen, default=here.rank)
