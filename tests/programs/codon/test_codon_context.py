"""The table of a model's context: counted from training genes alone, by organism; new organisms; padding."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from ascendrun.programs.codon import context as c
from ascendrun.programs.codon import files, genes
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.model import Config, batch_of, hidden, make_model
from ascendrun.programs.codon.train import start

SIZES = Config(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=128,
    context_residues=2,
)  # fmt: skip
OPTIONS = {"gradient_checkpointing": False, "attention": "full", "dropout": 0.0, "seed": 1}
NEW = "Yarrowia lipolytica"


@pytest.fixture(scope="module")
def data():
    return genes.generated(60, seed=5, val_size=0.2)


@pytest.fixture
def model(data, monkeypatch):
    monkeypatch.setattr(c, "SMOOTHINGS", (30.0,))
    found = make_model(SIZES, seed=1).eval()
    c.fill(found.context, data)
    return found


def rows_of(data, organism, *, val=False):
    return [data[number] for number in data.numbers(val=val) if data.organisms[number] == organism]


def expected(rows, ids, place, reach=2):
    """The logits of the codons of a residue, counted gene by gene."""
    residue = v.MASK_OF[ids[place]]
    codons = [token for token in range(v.FIRST_CODON, len(v.TOKENS)) if v.MASK_OF[token] == residue]
    counts = Counter(token for row in rows for token in row)
    total = sum(counts[each] + 1 for each in codons)
    found = []
    for codon in codons:
        frequency = (counts[codon] + 1) / total
        logit = math.log(frequency / c.OTHER)
        for distance in (each for each in range(-reach, reach + 1) if each):

            def near(row, at, distance=distance):
                return v.MASK_OF[row[at + distance]] if 0 <= at + distance < len(row) else v.PAD

            next_to = Counter(
                token for row in rows for at, token in enumerate(row)
                if v.MASK_OF[token] == residue and near(row, at) == near(ids, place)
            )  # fmt: skip
            smooth = (next_to[codon] + 30 * frequency) / (sum(next_to.values()) + 30)
            logit += math.log(smooth / frequency)
        found.append(logit)
    return codons, found


@pytest.mark.parametrize("place", [1, 2, 9, -3, -2])
def test_logits_are_those_of_counts_of_the_training_genes(data, model, place):
    """Also next to the ends."""
    [organism, *_] = sorted(set(data.organisms.tolist()))
    ids = rows_of(data, organism, val=True)[0].tolist()
    place %= len(ids)
    codons, wanted = expected([row.tolist() for row in rows_of(data, organism)], ids, place)
    for given in (ids, hidden(np.array(ids))[0]):
        found = model.context(torch.as_tensor(given)[None], torch.tensor([organism]))[0, place]
        assert found[codons].tolist() == pytest.approx(wanted, abs=1e-5)
        assert not found[: v.FIRST_CODON].any()
        assert torch.softmax(found, -1)[codons].sum() > 0.8


def test_neighbours_that_show_nothing_of_a_codon_are_drawn_to_zero_and_others_are_not():
    """Codons by chance, then each by the next residue."""
    data = genes.generated(300, seed=5, val_size=0.2)
    residues = genes.MASKS[data.tokens]
    codons = [v.codons_of(v.RESIDUES[residue - v.FIRST_RESIDUE]) for residue in residues]

    def largest(chosen):
        tokens = np.array([own[choice % len(own)] for own, choice in zip(codons, chosen)], np.uint8)
        context = make_model(SIZES, seed=1).context
        c.fill(context, replace(data, tokens=tokens))
        table = context.table.weight.view(SIZES.type_vocab_size, context.distances, -1)
        return table.abs().amax((0, 2)).tolist()

    _, before, own, after, _ = largest(np.random.default_rng(5).integers(12, size=len(codons)))
    assert before < 0.2 and after < 0.2 < own
    _, before, own, after, _ = largest([*(residues[1:] % 2), 0])
    assert before < 0.5 and after > 1


def test_a_validation_gene_and_an_organism_without_genes_count_nothing(data, model):
    tokens = data.tokens.copy()
    for number in data.numbers(val=True):
        tokens[data.starts[number] : data.starts[number + 1]] = v.FIRST_CODON
    again = make_model(SIZES, seed=1)
    c.fill(again.context, replace(data, tokens=tokens))
    assert torch.equal(again.context.table.weight, model.context.table.weight)
    by_organism = model.context.table.weight.view(SIZES.type_vocab_size, -1)
    assert by_organism.any(1).nonzero().flatten().tolist() == sorted(set(data.organisms.tolist()))


def test_padding_and_other_rows_of_a_batch_do_not_matter(data, model):
    numbers = [0, 1, 2]
    rows = [data[number] for number in numbers]
    made = [hidden(row) for row in rows]
    tensors = batch_of(rows, made, data.organisms[numbers], multiple=16).tensors
    together = model.context(tensors["ids"], tensors["organisms"], tensors["places"])
    one_by_one = [
        model.context(torch.from_numpy(inputs)[None], torch.tensor([data.organisms[number]]))[0][targets >= 0]
        for number, (inputs, targets) in zip(numbers, made)
    ]
    assert torch.equal(together, torch.cat(one_by_one))


def test_a_new_organism_of_a_finetuning_is_counted_and_known_ones_stay(data, model, tmp_path):
    files.save_model(model, v.ORGANISMS, tmp_path / "model")
    stored = files.load_stored(tmp_path / "model")
    names = v.ORGANISMS.with_new([NEW])
    some = data.numbers(val=False)[:9]
    organisms = data.organisms.copy()
    organisms[some] = names.find(NEW)
    tuned = start(OPTIONS, stored, replace(data, names=names, organisms=organisms))
    known = model.context.table.weight
    assert torch.equal(tuned.context.table.weight[: len(known)], known)
    fresh = start({**OPTIONS, **vars(SIZES)}, None, replace(data, names=names, organisms=organisms))
    assert torch.equal(tuned.context.table.weight[len(known) :], fresh.context.table.weight[len(known) :])
    assert fresh.context.table.weight[len(known) :].any()
