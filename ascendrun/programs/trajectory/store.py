"""Models in files: a trained classifier, a pretrained model, or several classifiers that vote; and their answers.

Class probabilities of many samples are computed on all ranks, each sample once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from ascendrun.planner.models import multiple_of
from ascendrun.programs.devices.accelerator import Accelerator, Precision, choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text, replace_weights, replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.model import Sizes, TrackClassifier, fuse, made_of, make_model, pad, stack_values
from ascendrun.programs.trajectory.points.tracks import FEATURES, Floats
from ascendrun.programs.trajectory.scores import Adjustment
from ascendrun.programs.trajectory.tokens import MASK, PAD, UNKNOWN, Encoded, Groups, check_known
from ascendrun.programs.trajectory.trees import Trees
from ascendrun.text import Text, listed

MODEL_FILE, PRETRAINED_FILE, VOTE_FILE = "model.pt", "pretrained.pt", "classifier.json"
SKIPPED_FILE = "skipped.json"
"""In the output of a pretraining that had nothing to learn from, and of the training to compare it with."""


@dataclass(frozen=True)
class Trained:
    """A model with all data to use it on raw tracks. `text`: grammar and resolution of the tokens; `priors`:
    the fraction of each class in training."""

    model: TrackClassifier
    sizes: Sizes
    vocabulary: dict[str, int]
    names: Sequence[str]
    text: dict[str, Any]
    priors: Sequence[float]


@dataclass(frozen=True)
class Vote:
    """Classifiers with averaged, then calibrated probabilities: see calibrate.Adjustment for the two parameters."""

    members: tuple[Trained, ...]
    temperature: float = 1.0
    prior_shift: float = 0.0

    @property
    def names(self) -> list[str]:
        return list(self.members[0].names)


def save_trained(trained: Trained, folder: Path) -> Path:
    """Write a classifier; next to it, in `transformers`, one for AutoModelForSequenceClassification if it can be."""
    if trained.sizes.is_transformers:
        save_for_transformers(trained, folder / "transformers")
    return write(
        folder / MODEL_FILE,
        {
            "weights": on_cpu(trained.model.state_dict()),
            "sizes": asdict(trained.sizes),
            "vocabulary": trained.vocabulary,
            "names": list(trained.names),
            "text": trained.text,
            "priors": list(trained.priors),
            "trees": trained.model.trees.as_tensors() if trained.model.trees else None,
        },
    )


def save_for_transformers(trained: Trained, folder: Path) -> None:
    """Write config, weights and tokenizer for AutoModelForSequenceClassification, AutoTokenizer and pipelines."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    labels = dict(enumerate(trained.names))
    config = made_of({**trained.sizes.config, "id2label": labels, "label2id": {name: i for i, name in labels.items()}})
    config.architectures = [f"{config.model_type.capitalize()}ForSequenceClassification"]
    weights = {
        name.replace("backbone.", "model.", 1).replace("head.", "score.", 1): tensor.contiguous()
        for name, tensor in on_cpu(trained.model.state_dict()).items()
    }
    words = Tokenizer(models.WordLevel(trained.vocabulary, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    folder.mkdir(parents=True, exist_ok=True)
    replace_weights(folder / "model.safetensors", weights)
    names = {"pad_token": PAD, "unk_token": UNKNOWN, "mask_token": MASK}  # transformers 4 adds token_type_ids else
    tokenizer = make(tokenizer_object=words, model_input_names=["input_ids", "attention_mask"], **names)
    if (
        config.model_type == "qwen2"
    ):  # AutoTokenizer of transformers 5 else takes Qwen2Tokenizer, whatever the class here
        tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["transformers.PreTrainedTokenizerFast"] * 2}
    tokenizer.save_pretrained(str(folder))
    replace_text(folder / "config.json", str(config.to_json_string()))


def load_trained(path: Path) -> Trained:
    """Load a classifier from its file or directory. Raises InvalidDataError if there is none."""
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.is_file():
        raise InvalidDataError(listed("program.no-trained-model", file=file))
    saved = load(file)
    if "names" not in saved:
        raise InvalidDataError(listed("program.not-a-classifier", file=file))
    sizes = Sizes(**saved["sizes"])
    model = make_model(sizes, seed=0)
    model.load_state_dict(saved["weights"])
    model.trees = Trees.from_tensors(saved["trees"]) if saved.get("trees") else None
    model.eval()
    return Trained(model, sizes, saved["vocabulary"], saved["names"], saved["text"], saved["priors"])


def save_pretrained(
    weights: Mapping[str, torch.Tensor],
    sizes: Sizes,
    vocabulary: Mapping[str, int],
    text: Mapping[str, Any],
    folder: Path,
) -> Path:
    return write(
        folder / PRETRAINED_FILE,
        {"weights": on_cpu(weights), "sizes": asdict(sizes), "vocabulary": dict(vocabulary), "text": dict(text)},
    )


def pretrained_folder(base: Path) -> Path | None:
    """Return the directory in `base` with a pretrained model; None: not the output of a pretraining."""
    return next((folder for folder in (base, base / "best") if (folder / PRETRAINED_FILE).is_file()), None)


def is_skipped(base: Path) -> bool:
    """Return whether the stage with this output, or with the model in it, did nothing."""
    return (base / SKIPPED_FILE).is_file() or (base.parent / SKIPPED_FILE).is_file()


def load_pretrained(folder: Path) -> dict[str, Any]:
    """Return weights, sizes, vocabulary and text, as saved."""
    return load(folder / PRETRAINED_FILE)


def load(file: Path) -> dict[str, Any]:
    """Load a file. Raises InvalidDataError if it is truncated or of another type."""
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, EOFError, UnpicklingError, ValueError) as error:
        raise InvalidDataError(listed("program.model-damaged", file=file)) from error


def save_vote(members: Sequence[Path], *, temperature: float, prior_shift: float, folder: Path) -> None:
    """Save a vote. Members are named relative to the file, so that the complete output may be moved."""
    named = [os.path.relpath(member.absolute(), folder.absolute()) for member in members]
    saved = {"members": named, "temperature": temperature, "prior_shift": prior_shift}
    replace_json(folder / VOTE_FILE, saved)


def load_vote(paths: Sequence[Path], accelerator: Accelerator, precision: Precision) -> Vote:
    """Load the output of an evaluation, or one or more trained models, on a device. Raises InvalidDataError."""
    adjustment = {}
    if len(paths) == 1 and (paths[0] / VOTE_FILE).is_file():
        adjustment = json.loads((paths[0] / VOTE_FILE).read_text(encoding="utf-8"))
        paths = [paths[0] / member for member in adjustment.pop("members")]
    vote = agreeing(Vote(tuple(load_trained(path) for path in paths), **adjustment))
    for member in vote.members:
        fuse(member.model, accelerator, precision.compute)
        member.model.to(accelerator.device).eval()
    return vote


def agreeing(vote: Vote) -> Vote:
    first = vote.members[0]
    if any(list(other.names) != list(first.names) or other.text != first.text for other in vote.members):
        raise InvalidDataError(listed("program.models-differ"))
    return vote


def write(path: Path, content: Mapping[str, Any]) -> Path:
    with replacing(path) as fresh:
        torch.save(dict(content), fresh)
    return path


def on_cpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}


def predict(model: TrackClassifier, samples: Sequence[Encoded], runtime: Runtime, options: Mapping[str, Any]) -> Floats:
    """Return class probabilities, one row per sample, the same on every rank. All ranks must call it together.

    Each rank computes every world_size-th sample by length, so the work is even, no sample is counted twice, and ranks
    with fewer batches than others do not wait inside the model. A batch is not larger than a pass of the training: the
    plan has the memory of that.
    """
    batch_size = options["micro_batch_size"] or -(-options["global_batch_size"] // runtime.world_size)
    multiple = multiple_of(options, runtime.family)
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i))
    mine = order[runtime.rank :: runtime.world_size]
    rows: list[Floats] = []
    was_training = model.training
    model.eval()
    precision = choose_precision(options["dtype"], runtime.accelerator)
    with torch.no_grad(), runtime.accelerator.autocast(precision.compute):
        for start in range(0, len(mine), batch_size):
            batch = [samples[i] for i in mine[start : start + batch_size]]
            rows += list(probabilities_of(model, batch, runtime.device, multiple=multiple))
    model.train(was_training)
    return merge(runtime.gather((mine, rows)), len(samples), model.head.out_features)


def merge(parts: Sequence[tuple[list[int], list[Floats]]], count: int, classes: int) -> Floats:
    """Merge all ranks' rows in sample order; every sample must be present exactly once."""
    numbers = [i for mine, _ in parts for i in mine]
    assert sorted(numbers) == list(range(count)), "samples lost or counted twice"
    whole = np.zeros((count, classes))
    for mine, rows in parts:
        if mine:
            whole[mine] = np.stack(rows)
    return whole


def probabilities_of(
    model: TrackClassifier, batch: Sequence[Encoded], device: torch.device, *, multiple: int
) -> Floats:
    """Return class probabilities of a batch, on this device. Requires a model in eval mode and disabled gradients."""
    ids, lengths = pad([sample.ids() for sample in batch], multiple=multiple)
    values = stack_values(batch, model.sizes.numbers)
    logits = model(ids.to(device), lengths.to(device), values=None if values is None else values.to(device))
    answer: Floats = torch.softmax(logits.float(), -1).double().cpu().numpy()
    return answer if model.trees is None else model.trees.vote(answer, batch)


def vote_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Mapping[str, Any]) -> Floats:
    """Return the mean over the members, adjusted; the same on every rank."""
    return put_together(vote, each_member_on(vote, samples, here, options))


def each_member_on(vote: Vote, samples: Sequence[Encoded], here: Runtime, options: Mapping[str, Any]) -> list[Floats]:
    if not samples:
        raise InvalidDataError(listed("program.nothing-to-classify"))
    return [predict(member.model, samples, here, options) for member in vote.members]


def put_together(vote: Vote, each: Sequence[Floats]) -> Floats:
    mean: Floats = np.mean(each, axis=0)
    return Adjustment(vote.temperature, vote.prior_shift).apply(mean, vote.members[0].priors)


def check_vocabulary(vote: Vote, samples: Sequence[Encoded], here: Runtime) -> None:
    """Warn if the models have not seen some of the tokens. Raises InvalidDataError if they have not seen most."""
    vocabulary = vote.members[0].vocabulary
    warning = check_known(samples, vocabulary, vocabulary, model=listed("program.the-model"))
    for text in (warning, *unlike(vote.members[0], samples)):
        if text is not None:
            here.log(listed("program.warning", text=text))


MOSTLY = 0.5
ABROAD = {"length": listed("program.other-sizes"), "interval_median": listed("program.other-sampling")}


def unlike(trained: Trained, samples: Sequence[Encoded]) -> list[Text]:
    """Return how most of the tracks differ from those of the training: waters, sizes, times between points."""
    groups, found = Groups.make(trained.vocabulary), []
    if len(known := groups.known_places()):
        away = float(np.mean([not np.isin(sample.head, known).any() for sample in samples]))
        if away > MOSTLY:
            found.append(listed("program.other-waters", share=away))
    rows = np.array([sample.values for sample in samples if len(sample.values)])
    for name, reason in ABROAD.items() if len(rows) else ():
        edges, values = trained.text["edges"][name], rows[:, FEATURES.index(name)]
        given = values[~np.isnan(values)]
        if len(given) and len(edges) > 2:
            away = float(((given < edges[1]) | (given > edges[-2])).mean())
            if away > MOSTLY:
                found.append(listed("program.unlike", what=reason, share=away))
    return found


def answer(row: Floats, names: Sequence[str], *, with_all: bool) -> dict[str, Any]:
    best = int(row.argmax())
    reply: dict[str, Any] = {"class_name": names[best], "confidence": round(float(row[best]), 4)}
    if with_all:
        reply["probabilities"] = {name: round(float(value), 4) for name, value in zip(names, row)}
    return reply
