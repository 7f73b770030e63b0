"""The stage export: a model as a directory that transformers reads; it also reads nanochat's checkpoints.

A `classic` model is transformers' NanoChatForCausalLM. A `current` one comes with a modelling file, made of this
package's own classes, which needs torch and transformers alone.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import inference, model
from ascendrun.programs.nanochat import sizes as nanochat_sizes
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.base import config_with
from ascendrun.programs.nanochat.model import NanoChat, empty_model
from ascendrun.programs.nanochat.sizes import Sizes
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text, replace_weights
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

MODELLING = "modeling_nanochat_current"
HEAD = '''"""The model nanochat-current of ascendrun for transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

'''
CLASSES = (
    Sizes, nanochat_sizes.rounded, model.norm, model.rotary_embeddings, model.apply_rotary_emb, model.linear,
    model.CausalSelfAttention, model.MLP, model.Block, NanoChat,
)  # fmt: skip
"""What the modelling file takes from this package."""
CONSTANTS = {
    **{name: getattr(nanochat_sizes, name) for name in ("VOCABULARY_MULTIPLE", "WINDOW_MULTIPLE")},
    **{name: getattr(nanochat_sizes, name) for name in ("VE_GATE_CHANNELS", "SMEAR_CHANNELS")},
    **{name: getattr(model, name) for name in ("SOFTCAP", "SHARPNESS", "ROTARY_BASE", "EPSILON", "SMEARED")},
}
UPSTREAM = (
    (r"^_orig_mod\.", ""),
    (r"^transformer\.wte\.", "embed_tokens."),
    (r"^transformer\.h\.", "layers."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.c_(.)\.", r".self_attn.\1_proj."),
    (r"\.attn\.ve_gate\.", ".self_attn.ve_gate."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
"""Patterns of the names of nanochat's weights, and their replacements."""


def export_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Write the model of `model_dir` with its tokenizer to `output_dir`, on rank 0's node."""
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    if here.is_first:
        files = sorted(Path(options["model_dir"]).glob("model_*.pt"))
        if files:
            trained, tokenizer = read_upstream(files[-1]), words.load(Path(options["tokenizer_dir"]))
        else:
            trained, tokenizer = inference.open_model(options)
        write(trained, tokenizer, output)
    here.log(listed("program.exported", directory=output))
    here.record(done=True)


def write(trained: NanoChat, tokenizer: Any, folder: Path) -> None:
    is_classic = trained.sizes.is_classic
    weights = {
        name if is_classic and name.startswith("lm_head") else f"model.{name}": each.detach().float().contiguous()
        for name, each in trained.state_dict().items()
    }
    replace_weights(folder / "model.safetensors", weights)
    words.save_files(folder, tokenizer.to_str())
    config = config_with(trained.sizes, tokenizer)
    if not is_classic:
        classes = {"AutoConfig": "NanoChatCurrentConfig", "AutoModelForCausalLM": "NanoChatCurrentForCausalLM"}
        config["auto_map"] = {name: f"{MODELLING}.{each}" for name, each in classes.items()}
        config["architectures"] = [classes["AutoModelForCausalLM"]]
        from ascendrun.programs.nanochat import modelling as ends  # imports transformers

        constants = "\n".join(f"{name} = {value!r}" for name, value in CONSTANTS.items())
        last = (ends.NanoChatCurrentConfig, ends.NanoChatCurrentForCausalLM)
        sources = [inspect.getsource(each).rstrip() for each in (ends.attention, *CLASSES, *last)]
        replace_text(folder / f"{MODELLING}.py", "\n\n\n".join([HEAD + constants, *sources]) + "\n")
    replace_json(folder / "config.json", config)


# --- nanochat's checkpoints ---


def read_upstream(file: Path) -> NanoChat:
    """Return the model of a checkpoint of nanochat, `model_STEP.pt` and `meta_STEP.json`, in float32 on the CPU.

    Raises InvalidDataError.
    """
    facts = file.with_name(f"meta_{file.stem[6:]}.json")
    try:
        config = json.loads(facts.read_text(encoding="utf-8"))["model_config"]
        weights = {our_name(name): each.float() for name, each in torch.load(file, weights_only=True).items()}
        sizes = Sizes(
            layers=config["n_layer"],
            hidden=config["n_embd"],
            heads=config["n_head"],
            kv_heads=config["n_kv_head"],
            vocabulary=config["vocab_size"],
            context=config["sequence_len"],
            window_pattern=config.get("window_pattern", "SSSL"),
            preset="current" if "resid_lambdas" in weights else "classic",
        )
        found = empty_model(sizes)
        found.load_state_dict(weights, assign=True)
    except Exception as error:  # torch.load has no class for a damaged file
        raise InvalidDataError(listed("program.bad-checkpoint", file=file, reason=repr(error))) from error
    return found


def our_name(name: str) -> str:
    for theirs, ours in UPSTREAM:
        name = re.sub(theirs, ours, name)
    return name
