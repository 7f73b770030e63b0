"""Models in files: a directory as transformers writes it, or the single files of CodonTransformer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.context import Context
from ascendrun.programs.codon.model import MODELLING, CodonModel, Config, with_organisms
from ascendrun.programs.codon.vocabulary import ORGANISMS, Organisms
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text, replace_weights
from ascendrun.text import listed

WEIGHTS, CONFIG, TABLE = "model.safetensors", "config.json", "organisms.json"
WORDS = "bert.embeddings.word_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
PREFIXES = ("model.", "module.", "_orig_mod.")
"""Of wrappers, in the names of weights in .ckpt files."""
NOT_TRAINED = ("bert.pooler.", "context.")
"""Beginnings of names of weights."""
NOT_WEIGHTS = ("position_ids", "token_type_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
"""Endings of names that other files may have: constants, and tied weights again."""


@dataclass(frozen=True)
class Stored:
    """A model as read from files. `organisms`: of its token types, by number."""

    config: Config
    weights: Mapping[str, torch.Tensor]
    organisms: Organisms

    def make(self, *, organisms: Organisms | None = None, dropout: float | None = None, **given: Any) -> CodonModel:
        """Return the model; with `organisms`, of these: its own and new ones. `dropout` None: its own.

        `given`: more arguments of CodonModel.
        """
        weights, config = with_organisms(self.weights, self.config, len(organisms or self.organisms))
        if dropout is not None:
            config = replace(config, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        with torch.device("meta"):
            model = CodonModel(config, **given)
        model.load_state_dict({**dict(weights)}, assign=True)
        for name, weight in model.named_parameters():
            weight.requires_grad_(not name.startswith(NOT_TRAINED))
        return model


def save_model(model: CodonModel, organisms: Organisms, folder: Path) -> None:
    """Write weights, tokenizer and organisms for this program and for transformers; the configuration last."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().float().cpu().contiguous() for name, weight in model.state_dict().items()}
    replace_weights(folder / WEIGHTS, weights)
    save_tokenizer(folder)
    if model.context is not None:
        replace_text(folder / f"{MODELLING}.py", modelling_source())
    replace_json(folder / TABLE, {"organisms": list(organisms.names)})
    replace_json(folder / CONFIG, model.config.as_json())


def modelling_source() -> str:
    """Return the file with which transformers reads a model with a context: it needs nothing of this package."""
    own = Path(__file__).with_name("modelling.py").read_text(encoding="utf-8")
    constants = {"PAD": v.PAD, "FIRST_CODON": v.FIRST_CODON, "MASK_OF": v.MASK_OF}
    lines = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    return own.replace(f"from {Context.__module__} import Context\n", f"{lines}\n\n{inspect.getsource(Context)}")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the merged words for AutoTokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    names = dict(zip(("unk_token", "cls_token", "sep_token", "pad_token", "mask_token"), v.TOKENS))
    tokenizer = Tokenizer(models.WordLevel(dict(v.IDS), unk_token=v.TOKENS[v.UNK]))
    tokenizer.add_special_tokens(list(v.TOKENS[: v.FIRST_RESIDUE]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", v.CLS), ("[SEP]", v.SEP)]
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": v.LONGEST, **names}
    replace_text(folder / "tokenizer.json", tokenizer.to_str() + "\n")
    replace_json(folder / "tokenizer_config.json", settings)


def load_stored(path: Path) -> Stored:
    """Read a directory with config.json, or a .pt or .ckpt file. Raises InvalidDataError."""
    if path.is_dir():
        return load_folder(path)
    if not path.is_file():
        raise InvalidDataError(listed("program.codon-no-model", path=path))
    saved = read_torch(path)
    given = saved.get("self.config")
    raw = saved.get("state_dict", saved)
    weights = clean({name: value for name, value in raw.items() if isinstance(value, torch.Tensor)})
    config = sizes_of(weights, path) if given is None else Config.of(given.to_dict())
    return checked(config, weights, ORGANISMS, path)


def load_folder(folder: Path) -> Stored:
    try:
        config = Config.of(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        table = Organisms.read(folder / TABLE) if (folder / TABLE).is_file() else ORGANISMS
        if (folder / WEIGHTS).is_file():
            from safetensors.torch import load_file

            weights = load_file(str(folder / WEIGHTS))
        else:
            weights = read_torch(folder / "pytorch_model.bin")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder, str(error)) from error
    except Exception as error:  # of safetensors, whose own class differs by version
        if isinstance(error, InvalidDataError) or type(error).__name__ != "SafetensorError":
            raise
        raise damaged(folder, str(error)) from error
    return checked(config, clean(weights), table, folder)


def damaged(path: Path, reason: str) -> InvalidDataError:
    return InvalidDataError(listed("program.codon-damaged", path=path, reason=reason))


def read_torch(path: Path) -> dict[str, Any]:
    """Read a file of torch without running code that is in it. Raises InvalidDataError."""
    from transformers import BigBirdConfig

    classes = getattr(torch.serialization, "safe_globals", None)
    try:
        if classes is None:  # before torch 2.5
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        with classes([BigBirdConfig]):
            return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, UnpicklingError, ValueError, TypeError) as error:
        raise damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def clean(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return float32 weights by the names of this program."""
    found = {}
    for name, weight in weights.items():
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        if not name.endswith(NOT_WEIGHTS):
            found[name] = weight.float()
    return found


def sizes_of(weights: Mapping[str, torch.Tensor], path: Path) -> Config:
    """Return the sizes that the shapes of weights have; the width of a head, which they do not show, is 64."""
    try:
        vocabulary, hidden = weights[WORDS].shape
        inner = weights["bert.encoder.layer.0.intermediate.dense.weight"].shape[0]
        return Config.of(
            {
                "vocab_size": vocabulary,
                "hidden_size": hidden,
                "num_hidden_layers": len([name for name in weights if name.endswith("intermediate.dense.weight")]),
                "num_attention_heads": max(1, hidden // 64),
                "intermediate_size": inner,
                "max_position_embeddings": len(weights[POSITIONS]),
                "type_vocab_size": len(weights[TYPES]),
            }
        )
    except (KeyError, ValueError) as error:
        raise damaged(path, f"no BigBird weights ({error})") from error


def checked(config: Config, weights: dict[str, torch.Tensor], organisms: Organisms, path: Path) -> Stored:
    """Return the model if names and shapes are those of its sizes. Raises InvalidDataError."""
    with torch.device("meta"):
        expected = {name: weight.shape for name, weight in CodonModel(config).state_dict().items()}
    for name in ("weight", "bias"):  # other programs may have left it out: it is not used
        if f"bert.pooler.{name}" not in weights:
            weights[f"bert.pooler.{name}"] = torch.zeros(expected[f"bert.pooler.{name}"])
    wrong = [
        f"{name} {list(weights[name].shape) if name in weights else None}"
        for name, shape in expected.items()
        if name not in weights or weights[name].shape != shape
    ]
    if wrong or len(organisms) > config.type_vocab_size:
        raise InvalidDataError(
            listed(
                "program.codon-weights",
                path=path,
                wrong=wrong[:4] or [f"{len(organisms)} organisms, {config.type_vocab_size} token types"],
            )
        )
    return Stored(config, {name: weights[name] for name in expected}, organisms)
