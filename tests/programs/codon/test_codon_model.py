"""The model against transformers' BigBird, its files, and files of others."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ascendrun.options import with_defaults
from ascendrun.planner.models import RowsOfRanks
from ascendrun.programs.codon import files
from ascendrun.programs.codon import rules as plan
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.model import CodonModel, Config, make_model
from ascendrun.programs.codon.train import mean_attended
from ascendrun.programs.devices.attention import Segments
from ascendrun.programs.errors import InvalidDataError
from tests.programs.codon.test_codon_plan import TABLE

SMALL = Config(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=96, max_position_embeddings=48
)


@pytest.fixture(scope="module")
def theirs():
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    torch.manual_seed(1)
    return BigBirdForMaskedLM(BigBirdConfig(**SMALL.as_json())).eval()


@pytest.fixture
def folder(tmp_path):
    files.save_model(make_model(SMALL, seed=1), v.ORGANISMS, tmp_path / "model")
    return tmp_path / "model"


def test_the_default_model_has_the_guides_weights():
    """S4-28: 89.6 M weights, 358.318 MB; the plan has the same number without building it."""
    with torch.device("meta"):
        model = CodonModel(Config())
    count = sum(weight.numel() for weight in model.parameters())
    assert count == 89_579_610 and round(4 * count / 1e6, 3) == 358.318
    shape = plan.CodonShape(
        hidden=768, inner=3072, layers=12, heads=12, kv_heads=12, head=64, vocabulary=90, is_tied=True,
        has_bias=True, positions=4096, organisms=164,
    )  # fmt: skip
    assert shape.weights == count


@pytest.mark.parametrize("reach, organisms", [(0, 164), (1, 164), (3, 165)])
def test_the_plan_has_the_weights_of_a_model_with_a_context(reach, organisms):
    config = replace(SMALL, context_residues=reach, type_vocab_size=organisms)
    shape, weights = plan.shape_of_config(config.as_json()), list(make_model(config, seed=1).parameters())
    assert shape.weights == sum(weight.numel() for weight in weights)
    rows = RowsOfRanks(1, "cpu", 9, 50.0, 60)
    work = plan.work_of(with_defaults(TABLE, {"mode": "pretrain"}), shape, rows)
    assert work.trained == sum(weight.numel() for weight in weights if weight.requires_grad)


def test_logits_equal_those_of_transformers_with_padding(theirs):
    model = CodonModel(SMALL).eval()
    model.load_state_dict(files.clean(theirs.state_dict()))
    lengths, width = [20, 11, 7], 20
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 90, (3, width), generator=chance)
    organisms, mask = torch.tensor([3, 51, 163]), torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, length:], mask[row, :length] = v.PAD, 1
    types = organisms[:, None].expand(-1, width)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
        segments = Segments.of_rows([[length] for length in lengths], width)
        found = model(ids, organisms, segments)
        places = torch.tensor([0, 25, 41])
        some = model(ids, organisms, segments, places)
    assert (found - expected)[mask.bool()].abs().max() <= 1e-5
    assert torch.allclose(some, found.flatten(0, 1)[places], atol=1e-6)


@pytest.mark.parametrize(
    "block, count, positions, lengths",
    [
        (4, 2, 64, [50, 39, 9]),  # padded to 52
        (4, 3, 90, [90, 45]),  # more blocks than the positions have
        (16, 3, 1024, [1024, 700]),  # the rule for the lengths of BigBird's paper
        (64, 3, 4096, [1024]),
        (64, 3, 2048, [767]),  # 12 blocks: the fewest
    ],
)
def test_block_sparse_attention_equals_that_of_transformers(block, count, positions, lengths):
    """The same random blocks and weights; in evaluations attention is exact. NumPy's own generator is left alone."""
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    config = replace(
        SMALL, hidden_size=32, intermediate_size=32, num_attention_heads=2, max_position_embeddings=positions,
        block_size=block, num_random_blocks=count, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    room = {**config.as_json(), "attention_type": "block_sparse", "max_position_embeddings": -(-positions // 4) * 4}
    theirs = BigBirdForMaskedLM(BigBirdConfig(**room)).train()
    with torch.no_grad():  # larger scores, so that the chosen blocks matter
        for name, weight in theirs.named_parameters():
            if name.endswith(("query.weight", "key.weight", "value.weight")):
                weight.mul_(30)
    state = files.clean(theirs.state_dict())
    state[files.POSITIONS] = state[files.POSITIONS][:positions]
    model = CodonModel(config, attention="block_sparse").train()
    model.load_state_dict(state)
    width = max(lengths)
    ids = torch.randint(5, 90, (len(lengths), width), generator=torch.Generator().manual_seed(3))
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids[~mask] = v.PAD
    organisms = torch.tensor([51, 3, 163][: len(lengths)])
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()
    found = model(ids, organisms, Segments.of_rows([[length] for length in lengths], width))
    assert np.random.get_state()[1].tolist() == before
    expected = theirs(ids, attention_mask=mask.long(), token_type_ids=organisms[:, None].expand(-1, width)).logits
    assert (found - expected)[mask].abs().max() <= 1e-5
    name = "bert.encoder.layer.0.attention.self.key.weight"
    for logits in (found, expected):
        logits[mask].square().mean().backward()
    gradients = [dict(each.named_parameters())[name].grad for each in (model, theirs)]
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-6) and gradients[0].abs().max() > 1e-5
    exact = CodonModel(config).eval()
    exact.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids, organisms), exact(ids, organisms))
        assert (model.train()(ids, organisms) - exact(ids, organisms))[mask].abs().max() > 1e-3


@pytest.mark.counts
@pytest.mark.parametrize("attention", ["full", "block_sparse"])
def test_the_flops_of_a_token_are_those_that_torch_counts(attention):
    """Forward and backward; of block-sparse attention only the blocks that are attended to."""
    length, rows = 1536, 2
    config = replace(SMALL, max_position_embeddings=length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = make_model(config, seed=1, attention=attention).train()
    ids = torch.randint(5, 90, (rows, length), generator=torch.Generator().manual_seed(3))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, torch.tensor([51, 3])).sum().backward()
    seen = mean_attended(np.array([length] * rows), model)
    assert seen == length if attention == "full" else 512 < seen < 600
    found = plan.flops_per_token(config.hidden_size, config.intermediate_size, config.num_hidden_layers, seen, 1.0)
    assert counter.get_total_flops() == pytest.approx(found * ids.numel(), rel=1e-6)


def test_a_saved_model_is_read_by_transformers_and_back_to_the_bit(folder, tmp_path):
    from transformers import AutoTokenizer, BigBirdForMaskedLM

    model, info = BigBirdForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "theirs")
    again = files.load_stored(tmp_path / "theirs")
    own = files.load_stored(folder)
    assert again.config == own.config == SMALL and own.organisms == v.ORGANISMS
    assert again.weights.keys() == own.weights.keys()
    assert all(torch.equal(again.weights[name], own.weights[name]) for name in own.weights)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = v.merge("MAV_", "ATGGCTGTGTAA")
    assert tokenizer(" ".join([*words, "X_UNK"]))["input_ids"] == v.ids_of([*words, "X_UNK"])
    assert tokenizer.model_max_length == 2048 and tokenizer.pad_token_id == v.PAD


READ = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
assert AutoTokenizer.from_pretrained("model")("m_unk __unk")["input_ids"] == IDS
try:
    AutoModelForMaskedLM.from_pretrained("model")
except ValueError as error:
    assert "trust_remote_code" in str(error)
else:
    raise AssertionError("a model without its context")
model = AutoModelForMaskedLM.from_pretrained("model", trust_remote_code=True).eval()
given = torch.load("given.pt")
with torch.no_grad():
    torch.save(model(**given).logits, "logits.pt")
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    assert model(**given, labels=labels).loss > 0
model.save_pretrained("again")
assert not any(name.startswith("ascendrun") for name in sys.modules)
"""


def test_a_model_with_a_context_is_read_by_transformers_alone_and_back_to_the_bit(tmp_path):
    """In another process. Without its own code it is refused, as its logits would lack the context."""
    model = make_model(replace(SMALL, context_residues=2), seed=1).eval()
    model.context.table.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    files.save_model(model, v.ORGANISMS, tmp_path / "model")
    ids, mask = torch.randint(5, 90, (2, 30), generator=torch.Generator().manual_seed(3)), torch.ones(2, 30).long()
    ids[1, 20:], mask[1, 20:] = v.PAD, 0
    organisms = torch.tensor([51, 3])
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": organisms[:, None].expand(-1, 30)}
    torch.save(given, tmp_path / "given.pt")
    env = {"HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    code = READ.replace("IDS", str(v.ids_of(["M_UNK", "__UNK"])))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        found = model(ids, organisms, Segments.of_rows([[30], [20]], 30))
    assert (torch.load(tmp_path / "logits.pt") - found)[mask.bool()].abs().max() <= 1e-5
    own, again = (files.load_stored(tmp_path / name) for name in ("model", "again"))
    assert again.config == own.config and own.config.context_residues == 2
    assert all(torch.equal(again.weights[name], own.weights[name]) for name in own.weights)


def test_single_files_of_others_are_read(theirs, tmp_path):
    state = theirs.state_dict()
    torch.save({**state, "self.config": theirs.config}, tmp_path / "model.pt")
    prefixed = {f"model.{name}": weight for name, weight in state.items()}
    torch.save({"state_dict": prefixed, "epoch": 3, "loops": {}}, tmp_path / "last.ckpt")
    torch.save({f"module.{name}": weight for name, weight in state.items()}, tmp_path / "finetune.ckpt")
    for name in ("model.pt", "last.ckpt", "finetune.ckpt"):
        stored = files.load_stored(tmp_path / name)
        assert stored.config == SMALL
        assert torch.equal(stored.weights[files.WORDS], state[files.WORDS])


def test_more_organisms_start_from_the_mean_and_others_stay(folder):
    stored = files.load_stored(folder)
    model = stored.make(organisms=v.ORGANISMS.with_new(["Yarrowia lipolytica"]))
    grown, known = model.bert["embeddings"].token_type_embeddings.weight, stored.weights[files.TYPES]
    assert torch.equal(grown[:164], known) and torch.allclose(grown[164], known.mean(0))
    assert model.config.type_vocab_size == 165


def test_files_that_do_not_fit_are_refused(folder, tmp_path, theirs):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    (tmp_path / "text.ckpt").write_text("no weights")
    short = {name: weight for name, weight in theirs.state_dict().items() if "layer.1.output" not in name}
    torch.save(short, tmp_path / "short.ckpt")
    wide = {**theirs.state_dict(), files.WORDS: torch.zeros(50, 64)}
    torch.save(wide, tmp_path / "wide.ckpt")
    for path in (tmp_path / "missing", tmp_path, *tmp_path.glob("*.pt"), *tmp_path.glob("*.ckpt")):
        with pytest.raises(InvalidDataError):
            files.load_stored(path)
    (folder / files.WEIGHTS).write_bytes(b"cut")
    with pytest.raises(InvalidDataError):
        files.load_stored(folder)


@pytest.mark.parametrize("sizes", [{"hidden_size": 10}, {"vocab_size": 50}, {"hidden_act": "relu"}])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(InvalidDataError):
        Config.of(sizes)
