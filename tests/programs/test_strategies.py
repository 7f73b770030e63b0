"""Programs that train their own models, by every strategy: the losses of one rank, resumed to the bit, resharded."""

import pytest

from ascendrun.programs.codon import genes
from tests.programs import recorded
from tests.programs.conftest import resharded
from tests.programs.nanochat.test_nanochat_stages import TOKENIZER

OWN = ["--max_steps=8", "--save_steps=2", "--save_total_limit=9", "--eval_steps=4", "--logging_steps=1"]
OWN += ["--dtype=float32", "--output_dir=out"]
SIZES = {
    "trajectory": recorded.arguments(
        {name: value for name, value in recorded.TRAJECTORY.items() if f"--{name}=" not in " ".join(OWN)}
    ),
    "codon": [
        *("--mode=pretrain", "--hidden_size=32", "--num_hidden_layers=2", "--num_attention_heads=2", "--dropout=0"),
        *(
            "--context_residues=1",
            "--learning_rate=0.003",
            "--global_batch_size=12",
            "--micro_batch_size=1",
            "--num_train_epochs=9",
        ),
    ],
    "nanochat": [
        *("--mode=base", "--data_path=generated", "--synthetic_documents=120", "--depth=3", "--aspect_ratio=16"),
        *("--head_dim=16", "--max_seq_len=32", "--micro_batch_size=1", "--total_batch_size=384", "--warmup_steps=2"),
        *("--matrix_lr=0.1", "--embedding_lr=0.6", "--unembedding_lr=0.03", "--eval_tokens=320"),
    ],
}
"""codon has 4096 positions: a weight that zero3 divides, unlike smaller ones. nanochat has Muon."""
WAYS = {
    "fsdp2-2": (2, ["--strategy=fsdp2"]),
    "fsdp2-4": (4, ["--strategy=fsdp2"]),
    "hsdp-4": (4, ["--strategy=hsdp", "--shard_size=2"]),
    "zero3-2": (2, ["--strategy=zero3"]),
    "zero3-4": (4, ["--strategy=zero3"]),
}
CASES = [(program, way) for program in SIZES for way in WAYS if (program, way[:5]) != ("nanochat", "zero3")]


def cases(*quick, of=CASES):
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.thorough) for case in of]


@pytest.fixture
def train(launch, fork_server, tmp_path):
    """train(program, way, name=…): a short training; way "1": on one rank."""

    def options_of(program):
        if program == "codon":
            genes.save(genes.generated(120, seed=5, val_size=0.2), tmp_path / "genes")
            return [f"--prepared_dir={tmp_path / 'genes'}"]
        if program == "nanochat":
            made = launch(program, [*TOKENIZER, "--output_dir=tok"], name="tok").succeed()
            return [f"--tokenizer_dir={made.folder / 'tok'}", f"--data_cache_dir={tmp_path / 'cache'}"]
        return []

    known = {}

    def begin(program, way, *options, name="run"):
        if program not in known:
            known[program] = [*SIZES[program], *OWN, *options_of(program)]
        ranks, strategy = WAYS.get(way, (int(way[-1]), []))
        if "zero3" in way:
            fork_server.ask({"import": "deepspeed"})
        return launch(program, [*known[program], *strategy, *options], name=name, ranks=ranks)

    return begin


def scores_of(run):
    """The evaluations of a training, by whichever report its program writes."""
    report = run.report()
    found = report.get("evaluations") or report["training"]["validation"]
    return [{name: value for name, value in each.items() if isinstance(value, float)} for each in found]


@pytest.mark.parametrize("program, way", cases(("codon", "zero3-2"), ("nanochat", "fsdp2-2")))
def test_losses_and_scores_are_those_of_one_rank(train, program, way):
    one, run = train(program, "1", name="one").succeed(), train(program, way).succeed()
    assert len(run.losses()) == 8 and run.losses() == pytest.approx(one.losses(), rel=1e-5)
    for ours, theirs in zip(scores_of(run), scores_of(one)):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_strategies_that_cannot_work_are_one_error_before_anything_is_read(train):
    for program, way, option, hint in (
        ("nanochat", "2", "zero3", "set strategy: fsdp2"),
        ("codon", "2", "none", "strategy: auto"),
    ):
        run = train(program, way, f"--strategy={option}", name=f"{program}-{option}")
        assert set(run.wait()) == {1} and hint in run.text() and "Traceback" not in run.text(), run.text()


@pytest.mark.parametrize("way", ["fsdp2-2", pytest.param("zero3-2", marks=pytest.mark.thorough)])
def test_a_sharded_training_continues_on_one_rank_and_on_two_again(train, way):
    strategy, runs = f"--strategy={way[:5]}", []

    def begin(ranks, name):
        runs.append(train("codon", ranks, strategy, name=name))
        return runs[-1]

    resharded(begin(way, "straight").succeed(), begin, {4: "1", 6: way})
    assert f"{way[:5]} has no other rank to shard with" in runs[1].text()


@pytest.mark.parametrize("way", ["fsdp2-2", pytest.param("zero3-2", marks=pytest.mark.thorough)])
def test_in_bfloat16_a_sharded_model_learns_as_a_replicated_one(train, way):
    for program in SIZES:
        if (program, way) == ("nanochat", "zero3-2"):
            continue
        sharded = train(program, way, "--dtype=bfloat16", name=f"{program}-{way}").succeed().losses()
        whole = train(program, "2", "--dtype=bfloat16", "--strategy=ddp", name=f"{program}-ddp").succeed().losses()
        assert sharded == pytest.approx(whole, rel=0.05), program


def test_more_than_one_process_prepares_batches(train):
    for program in SIZES:
        run = train(program, "1", "--dataloader_num_workers=2", "--max_steps=2", name=program).succeed()
        assert run.losses() == pytest.approx(
            train(program, "1", "--max_steps=2", name=f"{program}-0").succeed().losses()
        )
