"""DNA of a protein from the probabilities of its codons: the likeliest or drawn ones that keep all constraints.

Codons always belong to their residue. Sites and homopolymers are kept by an exact dynamic programme over the automaton
of forbidden words. GC windows and repeats need more of the past: a beam search, whose bound is the exact programme
without them, and a second search that proves the result the best one where few sequences are left.

A draw is the best sequence by scores with Gumbel noise: without constraints, each codon has exactly its probability.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ascendrun.programs.codon.asked import Drawing
from ascendrun.programs.codon.constraints import BASES, NO_CONSTRAINTS, Constraints, Words
from ascendrun.programs.codon.vocabulary import CODONS, FIRST_CODON, RESIDUES, codons_of
from ascendrun.programs.errors import ProgramError
from ascendrun.text import Text, listed

LEAST = -1e3
"""A smaller log-probability counts as this one, that of a codon that was never seen."""
OUTSIDE = -1e5
"""Added to the score of a codon outside the nucleus: chosen where the constraints leave no other one."""
BEAM, WIDE_BEAM, MOST_STATES = 256, 4096, 5_000
REPEAT_BEAM, WIDE_REPEAT_BEAM = 64, 512
IS_GC = np.array([[base in "GC" for base in codon] for codon in CODONS], dtype=np.int16)
BASE_CODES = np.array([[BASES.index(base) for base in codon] for codon in CODONS], dtype=np.int64)
EXACT_KEY_BASES = 44
MOST_CHOICES = 6
CHOICES = {
    residue: [own[min(column, len(own) - 1)] for column in range(MOST_CHOICES)]
    for residue in RESIDUES
    for own in [[token - FIRST_CODON for token in codons_of(residue)]]
}
"""The codons of each residue, the last one repeated; the repeated ones have the score -inf."""
EPSILON = 1e-9


@dataclass(frozen=True)
class Decoded:
    """`log_prob`: of the codons, before any temperature. `is_best`: no sequence that keeps the constraints is likelier,
    of a draw: has a higher score; it is proven."""

    dna: str
    log_prob: float
    is_best: bool


class InfeasibleError(ProgramError):
    """No sequence of the protein keeps the constraints, or none was found where `is_certain` is false.

    `position`: of the residue, from 1, at which no codon is possible, or of the first of the window.
    """

    def __init__(self, message: Text, *, position: int, residue: str, is_certain: bool = True) -> None:
        super().__init__(message)
        self.message, self.position, self.residue, self.is_certain = message, position, residue, is_certain


def decode(
    protein: str, log_probs: np.ndarray, constraints: Constraints = NO_CONSTRAINTS, drawing: Drawing | None = None
) -> Decoded:
    """Return the DNA of a protein, its stop included; drawing None: the likeliest.

    `log_probs`: [residues, 64] in the order of CODONS. A draw depends on the seed and the protein. Raises
    InfeasibleError, and KeyError for other letters than those of the vocabulary.
    """
    if log_probs.shape != (len(protein), len(CODONS)) or np.isnan(log_probs).any():
        raise ValueError(f"log-probabilities of shape {log_probs.shape} for {len(protein)} residues, or not a number")
    choices = np.array([CHOICES[residue] for residue in protein])
    sizes = np.array([len(codons_of(residue)) for residue in protein])
    log_probs = np.maximum(log_probs.astype(np.float64), LEAST)
    is_real = np.arange(MOST_CHOICES) < sizes[:, None]
    scores = np.where(is_real, np.take_along_axis(log_probs, choices, 1), -np.inf)
    if drawing is not None:
        noise = np.random.default_rng([drawing.seed, zlib.crc32(protein.encode())])
        scores = nucleus(scores, drawing) + noise.gumbel(size=scores.shape)
    path, is_best = _Task(protein, choices, scores, constraints).solve()
    log_prob = float(sum(row[codon] for row, codon in zip(log_probs, path)))
    return Decoded("".join(CODONS[codon] for codon in path), log_prob, is_best)


def decode_freely(protein: str, log_probs: np.ndarray, drawing: Drawing | None = None) -> str:
    """Return the DNA of the likeliest or drawn codons, which may belong to other residues than the protein's."""
    if drawing is not None:
        noise = np.random.default_rng([drawing.seed, zlib.crc32(protein.encode())])
        log_probs = nucleus(log_probs, drawing) + noise.gumbel(size=log_probs.shape)
    return "".join(CODONS[codon] for codon in log_probs.argmax(1))


def nucleus(scores: np.ndarray, drawing: Drawing) -> np.ndarray:
    """Return the log-probabilities that the codons of each row are drawn with; OUTSIDE is added outside the nucleus."""
    raised = np.exp((scores - scores.max(1, keepdims=True)) / drawing.temperature)
    chances = raised / raised.sum(1, keepdims=True)
    order = np.argsort(-chances, axis=1, kind="stable")
    ordered = np.take_along_axis(chances, order, 1)
    inside = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(inside, order, np.cumsum(ordered, axis=1) - ordered <= drawing.top_p, 1)
    with np.errstate(divide="ignore"):
        logs = np.log(chances / (chances * inside).sum(1, keepdims=True))
    logs = np.maximum(logs, OUTSIDE) + np.where(inside, 0.0, OUTSIDE)
    return np.where(np.isfinite(scores), logs, -np.inf)


@lru_cache(maxsize=8)
def next_codons(words: Words) -> np.ndarray:
    """Return [states, 64]: the state after each codon."""
    table = np.array(words.table, dtype=np.int32)
    after = [table[table[table[:, one], two], three] for one, two, three in BASE_CODES]
    return np.stack(after, axis=1)


class _Task:
    """One protein, the scores of the codons of each residue, and what the sequence must keep."""

    def __init__(self, protein: str, choices: np.ndarray, scores: np.ndarray, constraints: Constraints) -> None:
        self.protein, self.choices, self.scores, self.constraints = protein, choices, scores, constraints
        self.words = constraints.words
        self.next_codon = next_codons(self.words)
        self.bases = 3 * len(protein)
        self.ahead = self._best_ahead()

    def solve(self) -> tuple[list[int], bool]:
        """Return the codons of the best sequence found, and whether it is proven the best."""
        if self.constraints.gc:
            self._check_windows()
        path = self._follow()
        if self._keeps_all(path):
            return path, True
        first, wide = (REPEAT_BEAM, WIDE_REPEAT_BEAM) if self.constraints.repeat else (BEAM, WIDE_BEAM)
        search = _Search(self)
        found, was_cut = search.run(first)
        if found is None and was_cut:
            found, was_cut = search.run(wide)
        if found is None:
            raise self._not_found(search, is_certain=not was_cut)
        if not was_cut:
            return found, True
        score = sum(own[list(each).index(codon)] for each, own, codon in zip(self.choices, self.scores, found))
        most = MOST_STATES if not self.constraints.repeat else WIDE_REPEAT_BEAM
        better, was_cut = search.run(most, above=score + EPSILON)
        return better or found, not was_cut

    def _keeps_all(self, path: list[int]) -> bool:
        """Return whether GC windows and repeats are kept by codons that the words allow."""
        gc, repeat = self.constraints.gc, self.constraints.repeat
        if gc:
            sums = np.concatenate([[0], np.cumsum(IS_GC[path])])
            size, (low, high) = gc.bases(self.bases), gc.counts(self.bases)
            counts = sums[size:] - sums[: len(sums) - size]
            if counts.min() < low or counts.max() > high:
                return False
        dna = "".join(CODONS[codon] for codon in path)
        stretches = [dna[i : i + repeat] for i in range(len(dna) - repeat + 1)] if repeat else []
        return len(set(stretches)) == len(stretches)

    def _best_ahead(self) -> np.ndarray:
        """Return [residues + 1, states]: the best score of the rest of the protein without words, -inf: none."""
        if not self.words.words:
            rest = np.append(np.cumsum(self.scores.max(1)[::-1])[::-1], 0.0)
            return np.stack([rest, np.full(len(rest), -np.inf)], axis=1)
        ahead = np.zeros((len(self.protein) + 1, self.words.dead + 1))
        ahead[:, self.words.dead] = -np.inf
        for place in range(len(self.protein) - 1, -1, -1):
            after = ahead[place + 1][self.next_codon[:, self.choices[place]]]
            ahead[place] = (after + self.scores[place]).max(1)
        if ahead[0, 0] == -np.inf:
            raise self._words_everywhere()
        return ahead

    def _follow(self) -> list[int]:
        if not self.words.words:
            likeliest: list[int] = self.choices[np.arange(len(self.choices)), self.scores.argmax(1)].tolist()
            return likeliest
        path, state = [], 0
        for place, own in enumerate(self.choices):
            after = self.next_codon[state, own]
            best = int((self.scores[place] + self.ahead[place + 1][after]).argmax())
            path.append(int(own[best]))
            state = int(after[best])
        return path

    def _words_everywhere(self) -> InfeasibleError:
        """Return the error of the first residue that no sequence of codons gets past."""
        states = np.zeros(1, dtype=np.int32)
        for place, own in enumerate(self.choices):
            after = np.unique(self.next_codon[states][:, own])
            after = after[after != self.words.dead]
            if not len(after):
                sites = {word for state in states for codon in own for word in self.words.completed(int(state), codon)}
                message = listed(
                    "program.codon-words", position=place + 1, residue=self.protein[place], sites=sorted(sites)
                )
                return InfeasibleError(message, position=place + 1, residue=self.protein[place])
            states = after
        raise AssertionError("states are left at the end")

    def _check_windows(self) -> None:
        """Raise InfeasibleError for the first window that has too few or too many G and C with any codons."""
        gc = self.constraints.gc
        assert gc is not None
        size, (low, high) = gc.bases(self.bases), gc.counts(self.bases)
        starts = np.arange(self.bases - size + 1)
        ends = starts + size
        for extreme, is_out, is_high in (("max", low, False), ("min", high, True)):
            parts = [getattr(IS_GC[self.choices][:, :, a:b].sum(2), extreme)(1) for a, b in PARTS]
            counts = np.stack(parts, axis=1)
            whole = np.concatenate([[0], np.cumsum(counts[:, WHOLE])])
            inner = whole[ends // 3] - whole[-(-starts // 3)]
            head = np.where(starts % 3, counts[starts // 3, starts % 3 + 2], 0)
            tail = np.where(ends % 3, counts[np.minimum(ends // 3, len(self.choices) - 1), ends % 3 - 1], 0)
            total = inner + head + tail
            wrong = np.flatnonzero(total > is_out if is_high else total < is_out)
            if len(wrong):
                start = int(wrong[0])
                raise self._window_error(start, start + size, 100 * int(total[start]) / size, is_high=is_high)

    def _window_error(self, start: int, end: int, share: float, *, is_high: bool) -> InfeasibleError:
        gc = self.constraints.gc
        assert gc is not None
        place = start // 3
        where: dict[str, Any] = {"position": place + 1, "residue": self.protein[place]}
        values = {**where, "first": start + 1, "last": end, "share": share}
        if is_high:
            message = listed("program.codon-gc-high", limit=gc.high, **values)
        else:
            message = listed("program.codon-gc-low", limit=gc.low, **values)
        return InfeasibleError(message, **where)

    def _not_found(self, search: _Search, *, is_certain: bool) -> InfeasibleError:
        residue = self.protein[search.deepest]
        where: dict[str, Any] = {"position": search.deepest + 1, "residue": residue}
        if is_certain:
            message = listed("program.codon-infeasible", **where)
        else:
            message = listed("program.codon-not-found", **where)
        return InfeasibleError(message, is_certain=is_certain, **where)


class _Search:
    """Layers of partial sequences, codon by codon; those of equal prospects are one.

    Of each: its score, the state of the words, the GC content of its last bases (`recent`, or `count` where the window
    is the whole sequence), and the stretches of bases that it has (`stretches`; `tail`: its last bases).
    """

    def __init__(self, task: _Task) -> None:
        self.task = task
        gc, self.repeat = task.constraints.gc, task.constraints.repeat
        self.size = gc.bases(task.bases) if gc else 0
        self.low, self.high = gc.counts(task.bases) if gc else (0, 0)
        self.is_one_window = self.size == task.bases
        self.deepest = 0
        random = np.random.default_rng(0).integers(1, 2**63, max(self.size, 1), dtype=np.uint64) | np.uint64(1)
        is_exact = self.size <= EXACT_KEY_BASES
        self.weights = np.uint64(1) << np.arange(self.size, dtype=np.uint64) if is_exact else random
        whole = [[(IS_GC[own][:, :r].sum(1)) for r in (1, 2, 3)] for own in task.choices]
        self.least, self.most = ([[int(f(part)) for part in row] for row in whole] for f in (np.min, np.max))
        self.rests = [np.cumsum([0, *(row[2] for row in part[::-1])])[::-1] for part in (self.least, self.most)]

    def run(self, width: int, *, above: float = -np.inf) -> tuple[list[int] | None, bool]:
        """Return the best codons, None where none are left, and whether sequences were left out for `width`.

        `above`: sequences that cannot have a higher score are dropped, and the search ends at `width`.
        """
        task = self.task
        total, state = np.zeros(1), np.zeros(1, dtype=np.int32)
        recent = np.zeros((1, 1 if self.is_one_window else self.size), dtype=np.int16)
        tail, stretches = np.zeros(1, dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        was_cut = False
        for place, own in enumerate(task.choices):
            after = task.next_codon[state][:, own]
            bound = total[:, None] + task.scores[place] + task.ahead[place + 1][after]
            parent, column = np.nonzero((bound > above) & (bound > -np.inf))
            codon, new_state, bound = own[column], after[parent, column], bound[parent, column]
            new_total = total[parent] + task.scores[place][column]
            if self.size:
                new_recent, kept = self._windows(place, recent[parent], codon)
            else:
                new_recent, kept = recent[parent], np.ones(len(parent), dtype=bool)
            new_tail, new_stretches = tail[parent], np.zeros((len(parent), 0), dtype=np.int64)
            if self.repeat:
                new_tail, new_stretches = self._stretches(place, stretches, parent, tail[parent], codon, kept)
            chosen = np.flatnonzero(kept)
            if not self.repeat:
                chosen = self._unlike(chosen, new_state, new_recent, new_tail, new_total)
            if len(chosen) > width:
                was_cut = True
                if above > -np.inf:
                    return None, was_cut
                chosen = self._unlike(chosen, new_state, new_recent, new_tail, new_total)
                chosen = self._best(chosen, width, bound, new_recent)
            if not len(chosen):
                self.deepest = max(self.deepest, place)
                return None, was_cut
            total, state, recent, tail = new_total[chosen], new_state[chosen], new_recent[chosen], new_tail[chosen]
            if self.repeat:
                stretches = np.concatenate([stretches[parent[chosen]], new_stretches[chosen]], axis=1)
            steps.append((parent[chosen], codon[chosen]))
        at = int(total.argmax())
        path = []
        for parents, codons in reversed(steps):
            path.append(int(codons[at]))
            at = int(parents[at])
        return path[::-1], was_cut

    def _windows(self, place: int, recent: np.ndarray, codon: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the GC content of the last bases with this codon, and which sequences can still keep all windows."""
        now = 3 * place + 3
        if self.is_one_window:
            count = recent[:, 0] + IS_GC[codon].sum(1)
            fewest, most = (part[place + 1] for part in self.rests)
            return count[:, None], (count + most >= self.low) & (count + fewest <= self.high)
        line = np.concatenate([recent, IS_GC[codon]], axis=1)  # of the bases now - size - 3 to now
        sums = np.concatenate([np.zeros((len(line), 1), dtype=np.int16), np.cumsum(line, axis=1)], axis=1)
        ends = np.arange(max(now - 2, self.size), min(now + self.size - 1, self.task.bases) + 1)
        begin, present = ends - self.size - (now - self.size - 3), np.minimum(ends, now) - (now - self.size - 3)
        count = sums[:, present] - sums[:, begin]
        kept: np.ndarray = (count + self._fill(self.most, place, ends) >= self.low).all(1)
        kept &= (count + self._fill(self.least, place, ends) <= self.high).all(1)
        return line[:, 3:], kept

    def _fill(self, extreme: list[list[int]], place: int, ends: np.ndarray) -> np.ndarray:
        """Return the fewest or most G and C in the bases after this codon to each of `ends`; 0 before it."""
        filled, whole = [], 0
        for row in extreme[place + 1 : place + 2 + self.size // 3]:
            filled += [whole + part for part in row]
            whole += row[2]
        further = ends - 3 * (place + 1)
        counts: np.ndarray = np.array([0, *filled])[np.maximum(further, 0)]
        return counts

    def _stretches(
        self,
        place: int,
        stretches: np.ndarray,
        parent: np.ndarray,
        tail: np.ndarray,
        codon: np.ndarray,
        kept: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the last bases and the new stretches with this codon; clears `kept` where one was there before."""
        mask = (1 << 2 * self.repeat) - 1
        new = np.zeros((len(codon), 0), dtype=np.int64)
        for i in range(3):
            tail = (tail << 2 | BASE_CODES[codon, i]) & mask
            if 3 * place + i + 1 >= self.repeat:
                kept &= ~(stretches[parent] == tail[:, None]).any(1) & ~(new == tail[:, None]).any(1)
                new = np.concatenate([new, tail[:, None]], axis=1)
        return tail, new

    def _unlike(
        self, chosen: np.ndarray, state: np.ndarray, recent: np.ndarray, tail: np.ndarray, total: np.ndarray
    ) -> np.ndarray:
        """Return the best of each group of equal state, GC content and last bases."""
        keys = [state[chosen]]
        if self.is_one_window:
            keys.append(recent[chosen, 0])
        elif self.size:
            keys.append(recent[chosen].astype(np.uint64) @ self.weights)
        if self.repeat:
            keys.append(tail[chosen])
        order = np.lexsort((-total[chosen], *keys))
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
        unlike: np.ndarray = np.sort(chosen[order[is_first]])
        return unlike

    def _best(self, chosen: np.ndarray, width: int, bound: np.ndarray, recent: np.ndarray) -> np.ndarray:
        """Return `width` of them: half by the bound of the score, half the best of each GC content."""
        order: np.ndarray = chosen[np.argsort(-bound[chosen], kind="stable")]
        if not self.size:
            return order[:width]
        first, rest = order[: width // 2], order[width // 2 :]
        count = recent[rest].sum(1)
        by_count = np.argsort(count, kind="stable")
        ranks = np.empty(len(rest), dtype=np.int64)
        sorted_counts = count[by_count]
        ranks[by_count] = np.arange(len(rest)) - np.searchsorted(sorted_counts, sorted_counts)
        best: np.ndarray = np.concatenate([first, rest[np.argsort(ranks, kind="stable")][: width - len(first)]])
        return best


PARTS = ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3))
"""Of a codon: its first bases, all, its last bases."""
WHOLE = 2
