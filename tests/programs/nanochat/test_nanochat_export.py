"""Exported models beside the model itself, read by transformers; nanochat's checkpoints, read here."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import export
from ascendrun.programs.nanochat.base import save_model
from tests.programs.nanochat.test_nanochat_model import model_of

IDS = torch.randint(0, 80, (2, 150), generator=torch.Generator().manual_seed(0))
READ = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids, mask = torch.load("ids.pt"), torch.ones(1, 9)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        text = model.generate(ids[:1, :9], attention_mask=mask, max_new_tokens=5, do_sample=False)
    torch.save((logits, text), folder + ".pt")
    assert AutoTokenizer.from_pretrained(folder).bos_token == "<|bos|>"
assert not any(name.startswith("ascendrun") for name in sys.modules)
"""


SIZES = {"layers": 4, "context": 160}
"""More tokens than its short window; the vocabulary is not a multiple of 64."""


def exported(options):
    here = SimpleNamespace(is_first=True, log=lambda *line, **values: None, record=lambda **values: None)
    export.export_stage({"tokenizer_dir": "", **options}, here)


def test_transformers_has_the_logits_of_exported_models(tmp_path):
    """In another process, which does not import ascendrun."""
    pytest.importorskip("transformers.models.nanochat")
    models = {preset: model_of(preset=preset, **SIZES) for preset in ("classic", "current")}
    for preset, (ours, tokenizer) in models.items():
        save_model(ours, tokenizer, tmp_path / "model", training={})
        exported({"model_dir": str(tmp_path / "model"), "output_dir": str(tmp_path / preset)})
    torch.save(IDS, tmp_path / "ids.pt")
    env = {"HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", READ, *models]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for preset, (ours, _) in models.items():
        logits, found = torch.load(tmp_path / f"{preset}.pt")
        with torch.no_grad():
            wanted, text = ours(IDS), IDS[:1, :9]
            for _ in range(5):
                text = torch.cat([text, ours(text)[:, -1:].argmax(-1)], 1)
        assert wanted.std() > 0.1 and (logits - wanted).abs().max() <= 1e-5
        assert found.tolist() == text.tolist()


@pytest.mark.parametrize("preset", ["classic", "current"])
def test_a_checkpoint_of_nanochat_is_the_same_model(preset, tmp_path):
    ours, tokenizer = model_of(preset=preset, **SIZES)
    sizes = ours.sizes
    names = {export.our_name(name): name for name in upstream_names(ours)}
    assert names.keys() == ours.state_dict().keys()
    weights = {f"_orig_mod.{names[name]}": each.clone() for name, each in ours.state_dict().items()}
    facts = {
        "n_layer": sizes.layers, "n_embd": sizes.hidden, "n_head": sizes.heads, "n_kv_head": sizes.kv_heads,
        "vocab_size": sizes.vocabulary, "sequence_len": sizes.context,
    }  # fmt: skip
    there = tmp_path / "d4"
    there.mkdir()
    for step in (90, 120):
        torch.save(weights if step == 120 else {}, there / f"model_{step:06d}.pt")
        (there / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": facts}))
    (tmp_path / "tok").mkdir()
    export.words.save_files(tmp_path / "tok", tokenizer.to_str())
    options = {"model_dir": str(there), "tokenizer_dir": str(tmp_path / "tok"), "output_dir": str(tmp_path / "out")}
    exported(options)
    found, _ = export.inference.open_model({"model_dir": str(tmp_path / "out")})
    assert found.sizes.is_classic == (preset == "classic")
    with torch.no_grad():
        assert (found(IDS) - ours(IDS)).abs().max() <= 1e-6
    (there / "meta_000120.json").write_text('{"model_config": {"n_layer": 4}}')
    with pytest.raises(InvalidDataError):
        exported(options)


def upstream_names(model):
    """The names of upstream's weights, written down from its model."""
    for name in model.state_dict():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if name.startswith("layers."):
            known = {
                "self_attn.q_proj": "attn.c_q", "self_attn.k_proj": "attn.c_k", "self_attn.v_proj": "attn.c_v",
                "self_attn.o_proj": "attn.c_proj", "self_attn.ve_gate": "attn.ve_gate",
                "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
            }  # fmt: skip
            yield f"transformer.h.{layer}.{known[rest.removesuffix('.weight')]}.weight"
        else:
            yield "transformer.wte.weight" if name == "embed_tokens.weight" else name
