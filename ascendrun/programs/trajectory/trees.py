"""Trees on the summary of a track, which vote with the network: grown by scikit-learn, kept as arrays.

On a few thousand ships boosted trees find sizes and places that a network does not; together both are better than each.
Their mean with a forest of random splits is better than each on few ships. Rare classes weigh as in the network's loss.
On few ships boosted trees are overconfident, and the network may add nothing: the trees are calibrated on ships that
they were not grown on, and the network votes where that is certainly better.
Where training has no ships, what trees learned of places is wrong: there, trees vote that were grown without the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Callable

import numpy as np
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.scores import Adjustment, best_temperature, nats_of_ships
from ascendrun.programs.trajectory.tokens import Encoded, Ids
from ascendrun.text import listed

ROUNDS, LEAVES = 60, 15
RANDOM_TREES, TRIED = 100, 0.4
"""Trees of the forest, and the fraction of the numbers that each of their splits may choose from."""
MOST_LEAVES = 4000
"""Of each of them: of more tracks, a leaf has several, so that a model has a limited size."""
OTHERS = ("elsewhere", "forest")
NODE = ("is_leaf", "feature_idx", "num_threshold", "missing_go_to_left", "left", "right", "value")
"""Arrays of a boosted tree in scikit-learn."""
RARELY = 0.05
"""Fraction of the training tracks: where fewer lack a number, the trees have not learned what its absence means."""
CHECKED = 200
"""Tracks on which the trees that are kept must answer as scikit-learn does."""
MIXED = tuple(np.linspace(0.1, 0.9, 9).tolist())
"""Weights of the trees next to a network."""
USUAL_WEIGHT, USUAL_SHIPS = 0.7, 20.0
"""The weight that is best on a few thousand ships, and the number of ships that another one has to convince."""
FOLDS = 3
"""Of the ships, to see how confident trees are about ships that they were not grown on."""


@dataclass(frozen=True)
class Trees:
    """`feature` to `value`: arrays (tree, node); the trees of a round are those of `labels` in turn, for two classes
    that of the second. A leaf leads to itself. `start` None: a forest, of which a leaf has the share of each label.
    `forest`: has half of the answer, after which the classes have `class_weights`; None: boosted trees of an earlier
    version, or alone. `expected`: whether (almost) all training tracks have the number.
    `weight`: share of the trees in the vote; `temperature`: makes them as confident as they are right. `places`: ids of
    the tokens of known places, None: trees for any place; a track without such a token is left to `elsewhere`, as is
    one that lacks an expected number."""

    feature: Any
    threshold: Any
    unknown_left: Any
    left: Any
    right: Any
    value: Any
    start: Any
    labels: Any
    expected: Any
    classes: int
    depth: int
    weight: float = 1.0
    temperature: float = 1.0
    places: Any = None
    elsewhere: Trees | None = None
    forest: Trees | None = None
    class_weights: Any = None

    def as_tensors(self) -> dict[str, Any]:
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in each.items()}
        return {**kept, **{name: getattr(self, name) and getattr(self, name).as_tensors() for name in OTHERS}}

    @staticmethod
    def from_tensors(saved: Mapping[str, Any]) -> Trees:
        each: dict[str, Any] = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in saved.items()}
        others = {name: Trees.from_tensors(saved[name]) for name in OTHERS if saved.get(name)}
        return Trees(**{**each, **others})

    def ask(self, samples: Sequence[Encoded]) -> Floats:
        """Return the class probabilities of each track, from its summary alone."""
        values = table(samples, len(self.expected))
        tree, row = np.arange(len(self.feature))[:, None], np.arange(len(values))[None, :]
        at = np.zeros((len(self.feature), len(values)), dtype=np.int64)
        for _ in range(self.depth):
            number = values[row, self.feature[tree, at]]
            is_left = np.where(np.isnan(number), self.unknown_left[tree, at], number <= self.threshold[tree, at])
            at = np.where(is_left, self.left[tree, at], self.right[tree, at])
        leaves, found = self.value[tree, at], np.zeros((len(values), self.classes))
        if self.start is None:
            found[:, self.labels] = leaves.mean(0)
            return found
        raw = leaves.reshape(-1, len(self.start), len(values)).sum(0) + self.start[:, None]
        raw = raw if len(raw) > 1 else np.stack([np.zeros(len(values)), raw[0]])
        odds = np.exp((raw - raw.max(0)) / self.temperature)
        found[:, self.labels] = (odds / odds.sum(0)).T
        return found if self.forest is None else joined(found, self.forest.ask(samples), self.class_weights)

    def vote(self, network: Floats, samples: Sequence[Encoded]) -> Floats:
        """Return the weighted mean with the network's probabilities. A track that lacks an expected number, or whose
        place is not known, has the vote of `elsewhere`; if it lacks more, or there is none, the network's alone: it was
        trained without some of them."""
        return self._votes(network, samples)(self.weight)

    def _votes(self, network: Floats, samples: Sequence[Encoded]) -> Callable[[float], Floats]:
        """Return the vote as a function of the weight; the trees are asked once."""
        fits: Any = ~np.isnan(table(samples, len(self.expected))[:, self.expected]).any(1)
        if self.places is not None:
            fits &= np.array([np.isin(sample.head, self.places).any() for sample in samples], dtype=bool)
        rest = network if self.elsewhere is None else self.elsewhere.vote(network, samples)
        own = self.ask(samples)
        return lambda weight: np.where(fits[:, None], (1 - weight) * network + weight * own, rest)

    def weighed(self, network: Floats, samples: Sequence[Encoded], ships: Sequence[str]) -> Trees:
        """Return the trees with the weight that fits these tracks, which none has seen."""
        weight = best_weight(self._votes(network, samples), [sample.label for sample in samples], ships)
        elsewhere = self.elsewhere.weighed(network, samples, ships) if self.elsewhere else None
        return replace(self, weight=weight, elsewhere=elsewhere)


def joined(boosted: Floats, forest: Floats, class_weights: Floats) -> Floats:
    both: Floats = (boosted + forest) * class_weights
    both /= both.sum(1, keepdims=True)
    return both


def best_weight(votes: Callable[[float], Floats], truth: Sequence[int], ships: Sequence[str]) -> float:
    """Return the weight of the lowest loss by ship, drawn towards the usual one, but only where both together are
    better than each by a standard error; else that of one part alone, the trees first."""
    losses = {weight: nats_of_ships(votes(weight), truth, ships) for weight in (0.0, *MIXED, 1.0)}

    def drawn(weight: float) -> float:
        own, rest = np.log(USUAL_WEIGHT / weight), np.log((1 - USUAL_WEIGHT) / (1 - weight))
        return float(losses[weight].sum() + USUAL_SHIPS * (USUAL_WEIGHT * own + (1 - USUAL_WEIGHT) * rest))

    def is_better(one: float, other: float) -> bool:
        saved = losses[other] - losses[one]
        return bool(saved.sum() > np.sqrt((saved**2).sum()))

    both = min(MIXED, key=drawn)
    if not is_better(both, 1.0):
        return 1.0
    return 0.0 if is_better(0.0, 1.0) and not is_better(both, 0.0) else both


def table(samples: Sequence[Encoded], numbers: int) -> Floats:
    """Return the summaries; those of a text without one are unknown."""
    unknown = np.full(numbers, np.nan)
    return np.stack([sample.values if len(sample.values) else unknown for sample in samples]).astype(np.float64)


def least_of_leaf(tracks: int) -> int:
    """Return the least number of tracks of a leaf: 20 for many; of a few, trees with such leaves learn nothing."""
    return min(20, max(5, tracks // 40))


def grow_trees(train: Sequence[Encoded], classes: int, rounds: int = ROUNDS) -> Trees:
    """Fit boosted trees. The same data gives the same trees: there is no time limit.

    scikit-learn has no public access to them: they are read from its private arrays, and compared with its answers.
    Raises InvalidDataError if these differ.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    model: Any = HistGradientBoostingClassifier(
        max_iter=rounds,
        max_leaf_nodes=LEAVES,
        min_samples_leaf=least_of_leaf(len(train)),
        early_stopping=False,
        random_state=0,
    )
    return grown(model, train, classes)


def grow_forest(train: Sequence[Encoded], classes: int) -> Trees:
    """Fit extremely randomised trees, likewise."""
    from sklearn.ensemble import ExtraTreesClassifier

    least = -(-len(train) // MOST_LEAVES)
    model = ExtraTreesClassifier(RANDOM_TREES, max_features=TRIED, min_samples_leaf=least, random_state=0)
    return grown(model, train, classes)


def grow_both(train: Sequence[Encoded], classes: int, class_weights: Sequence[float]) -> Trees:
    forest = grow_forest(train, classes)
    return replace(grow_trees(train, classes), forest=forest, class_weights=np.array(class_weights))


def grown(model: Any, train: Sequence[Encoded], classes: int) -> Trees:
    rows = table(train, len(train[0].values))
    known = ~np.isnan(rows)
    lowest, highest = rows.min(0, where=known, initial=np.inf), rows.max(0, where=known, initial=-np.inf)
    columns = np.flatnonzero(highest > lowest)  # scikit-learn fails on a column without any number
    model.fit(rows[:, columns], [sample.label for sample in train])
    start, labels, expected = None, np.asarray(model.classes_), known.mean(0) > 1 - RARELY
    if hasattr(model, "_predictors"):
        boosted = [each.nodes for trees in model._predictors for each in trees]
        start = np.asarray(model._baseline_prediction, dtype=np.float64).reshape(-1)
        nodes, depth = [[each[name] for name in NODE] for each in boosted], max(each["depth"].max() for each in boosted)
    else:
        own = [each.tree_ for each in model.estimators_]
        depth = max(each.max_depth for each in own)
        nodes = [
            [
                one.children_left < 0, one.feature, one.threshold, one.missing_go_to_left, one.children_left,
                one.children_right, one.value[:, 0],
            ]
            for one in own
        ]  # fmt: skip
    arrays = packed(nodes, columns)
    trees = Trees(**arrays, start=start, labels=labels, expected=expected, classes=classes, depth=int(depth))
    told = model.predict_proba(rows[:CHECKED, columns])
    if not np.allclose(trees.ask(train[:CHECKED])[:, trees.labels], told, atol=1e-6):
        raise InvalidDataError(listed("program.trees-layout"))
    return trees


def packed(trees: Sequence[Sequence[Any]], columns: Ids) -> dict[str, Any]:
    """Return `feature` to `value` of trees, each its arrays in the order of NODE. What follows the last node of a tree
    is never reached."""
    size, rows = max(len(tree[0]) for tree in trees), []
    for is_leaf, feature, threshold, unknown_left, left, right, value in trees:
        own, is_end = np.arange(len(is_leaf)), is_leaf.astype(bool)
        sides = [np.where(is_end, own, side).astype(np.int32) for side in (left, right)]
        number = columns[np.where(is_end, 0, feature)].astype(np.int32)
        each = (number, threshold, unknown_left.astype(bool), *sides, value)
        rows.append([np.resize(array, (size, *array.shape[1:])) for array in each])
    names = ("feature", "threshold", "unknown_left", "left", "right", "value")
    return {name: np.stack(arrays) for name, arrays in zip(names, zip(*rows))}


def confidence(train: Sequence[Encoded], ships: Sequence[str], classes: int, class_weights: Sequence[float]) -> float:
    """Return the temperature of the boosted trees at which both together are as confident as they are right: each ship
    is asked of trees that were grown without it."""
    kind = {ship: sample.label for ship, sample in zip(ships, train)}
    fold = {ship: i % FOLDS for i, ship in enumerate(sorted(kind, key=lambda ship: (kind[ship], ship)))}
    folds, truth = np.array([fold[ship] for ship in ships]), np.array([sample.label for sample in train])
    boosted, forest = np.zeros((2, len(train), classes))
    for number in range(FOLDS):
        rest, own = ([train[i] for i in np.flatnonzero(each).tolist()] for each in (folds != number, folds == number))
        if own and len({sample.label for sample in rest}) > 1:
            boosted[folds == number] = grow_trees(rest, classes).ask(own)
            forest[folds == number] = grow_forest(rest, classes).ask(own)
    asked = np.flatnonzero(boosted[np.arange(len(train)), truth]).tolist()  # of a class that the others have too
    if not asked:
        return 1.0
    return best_temperature(
        lambda each: joined(Adjustment(each).apply(boosted[asked], [1.0]), forest[asked], np.array(class_weights)),
        truth[asked].tolist(),
        [ships[i] for i in asked],
    )
