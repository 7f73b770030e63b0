"""Training on own replies: the loss beside numbers computed by hand, tool tokens without loss, resumed to the bit."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ascendrun.programs.generation.engine import Completion
from ascendrun.programs.nanochat import sft
from ascendrun.programs.nanochat.base import save_model
from ascendrun.programs.nanochat.conversations import TOOL
from ascendrun.programs.trainer.data import IGNORED
from tests.programs.nanochat.test_nanochat_evaluation import Knows, pupil_of, tasks_of
from tests.programs.nanochat.test_nanochat_model import model_of

SUMS = [{"kind": "sums", "rows": 60}]
RL = (
    "--mode=rl", f"--mixture={json.dumps(SUMS)}", "--examples_per_step=4", "--num_samples=16", "--max_new_tokens=2",
    "--init_lr_frac=1", "--matrix_lr=0.5", "--embedding_lr=3", "--unembedding_lr=0.3", "--micro_batch_size=8",
    "--max_steps=9", "--save_steps=3", "--logging_steps=1", "--eval_steps=9", "--dtype=float32", "--output_dir=out",
)  # fmt: skip


class Fixed(torch.nn.Module):
    """Probabilities of the next token that do not depend on the text."""

    def __init__(self, *probabilities):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


def practice(**options):
    engine = SimpleNamespace(module=None, autocast=torch.no_grad)
    pupil = SimpleNamespace(here=SimpleNamespace(family="cpu", device="cpu"), engine=engine)
    usual = {"micro_batch_size": 0, "clip": 0.0, "kl": 0.0}
    return sft.Practice(pupil, None, {**usual, **options}, None)


def replied(*tokens, given=(), final=None):
    return Completion([0, 1], 9, tokens=list(tokens), given=set(given), final=final)


def test_advantages_have_no_variance_and_tokens_of_the_calculator_no_loss():
    right, forced, other = sft.made_of(
        [replied(1, 2), replied(2, 1, 2, given=[1], final=0), replied(0)], [1.0, 0.0, 0.0]
    )
    assert [each.advantage for each in (right, forced, other)] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert (right.ids, right.targets) == ([0, 1, 1, 2], [IGNORED, 1, 2])
    assert (forced.ids, forced.targets) == ([0, 1, 2, 1, 2, 0], [IGNORED, 2, IGNORED, 2, 0])

    model, work = Fixed(0.5, 0.2, 0.3), practice()
    (batch,) = work.batches([right, forced, other])
    assert batch.weight == 2 + 3 + 1 and batch.samples == 3  # the tokens that the model chose
    loss = work.loss(model, batch.tensors)
    gains = 2 / 3 * math.log(0.2 * 0.3) - 1 / 3 * math.log(0.3 * 0.3 * 0.5) - 1 / 3 * math.log(0.5)
    assert loss.item() == pytest.approx(-gains, rel=1e-6)
    loss.backward()
    # Of a token: advantage x (1 where it is, minus its probability).
    pulls = [2 / 3 * 0 - 1 / 3 * 1 - 1 / 3 * 1, 2 / 3 * 1, 2 / 3 * 1 - 1 / 3 * 2]
    total = 2 / 3 * 2 - 1 / 3 * 3 - 1 / 3
    expected = [-(pull - total * each) for pull, each in zip(pulls, (0.5, 0.2, 0.3))]
    assert model.logits.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_questions_whose_replies_are_equal_count_without_a_pass():
    same, mixed = sft.made_of([replied(1), replied(2)], [1.0, 1.0]), sft.made_of([replied(1), replied(2)], [1.0, 0.0])
    work = practice(micro_batch_size=1)
    batches = work.batches([*same, *mixed])
    assert [batch.samples for batch in batches] == [1, 1] and sum(batch.weight for batch in batches) == 4
    (alone,) = work.batches(same)
    assert alone.weight == 2 and work.loss(Fixed(0.5, 0.2, 0.3), alone.tensors).item() == 0


def test_clip_and_kl_are_those_of_the_papers():
    """A ratio beyond the limit has no gradient where it would go further; the divergence is exp(d) - d - 1."""
    made = sft.made_of([replied(1), replied(2)], [1.0, 0.0])
    (batch,) = practice().batches(made)
    model, old = Fixed(0.5, 0.3, 0.2), torch.tensor([0.5, 0.2, 0.3]).log()
    before = torch.where(batch.tensors["targets"] > 0, old[batch.tensors["targets"].clamp_min(0)], 0.0)
    clipped = practice(clip=0.2).loss(model, {**batch.tensors, "old": before})
    assert clipped.item() == pytest.approx(-(0.5 * 1.2 - 0.5 * 0.8))  # ratios are 1.5 and 2/3
    near = practice(clip=0.6).loss(model, {**batch.tensors, "old": before})
    assert near.item() == pytest.approx(-(0.5 * 1.5 - 0.5 * 2 / 3))
    apart = practice(kl=0.1).loss(model, {**batch.tensors, "reference": before})
    plain = practice().loss(model, batch.tensors)
    away = [math.log(0.2 / 0.3), math.log(0.3 / 0.2)]
    assert (apart - plain).item() == pytest.approx(0.1 * sum(math.exp(each) - each - 1 for each in away), rel=1e-5)


def test_replies_that_call_the_calculator_learn_the_call_and_not_its_result(tmp_path):
    file = tmp_path / "gsm.jsonl"
    answer = "It is 48/2=<<48/2=24>>24. So 24+48=<<24+48=72>>72.\n#### 72"
    file.write_text(json.dumps({"question": "Half of 48 and 48?", "answer": answer}) + "\n")
    _, tokenizer = model_of()
    (examples,) = tasks_of({"kind": "gsm8k", "file": str(file)}).values()
    options = {
        "seed": 3, "max_num_seqs": 1, "num_samples": 2, "temperature": 0.01, "top_k": 0, "top_p": 1.0,
        "max_new_tokens": 0, "clip": 0.0, "kl": 0.0,
    }  # fmt: skip
    pupil = pupil_of(Knows(tokenizer, examples, set()), tokenizer)
    made = sft.Practice(pupil, None, options, None).draw([(0, examples[0])])
    assert [each.reward for each in made] == [1, 1] and [each.advantage for each in made] == [0, 0]
    python_start, python_end, output_start, output_end = map(tokenizer.token_to_id, TOOL)
    learned = [token for token in made[0].targets if token != IGNORED]
    assert learned.count(python_start) == learned.count(python_end) == 2 == made[0].ids.count(output_end)
    assert output_start not in learned and output_end not in learned
    results = len("24") + len("72") + 4
    prompt = len(made[0].targets) - len(learned) - results
    assert made[0].targets[prompt] == made[0].ids[prompt + 1] and made[0].targets[prompt - 1] == IGNORED


@pytest.fixture
def model(tmp_path):
    """A model without knowledge, which finds an answer of one token now and then."""
    made = model_of("What is?+0123456789", layers=2, hidden=32, heads=2, context=40)
    save_model(*made, tmp_path / "model", training={"max_seq_len": 40, "total_batch_size": 1 << 19})
    return tmp_path / "model"


def rewards(run):
    return {line["step"]: line["reward"] for line in run.metrics() if "reward" in line}


def test_a_training_killed_inside_its_replies_ends_with_the_same_bits(model, launch):
    """On two ranks. On one rank, and with other passes, it is the same but for rounding."""
    options = [*RL, f"--model_dir={model}"]
    straight = launch("nanochat", options, name="straight", ranks=2).succeed()
    # Of step 5 the replies are drawn then, or those of the next.
    launch("nanochat", options, name="broken", ranks=2).killed_at(5, 1, 0)
    again = launch("nanochat", options, name="broken", ranks=2).succeed()
    assert rewards(again) == rewards(straight) and again.losses() == straight.losses()
    assert again.weights() == straight.weights()
    start = {name: each.tolist() for name, each in load_file(model / "model.safetensors").items()}
    assert len(rewards(straight)) == 9 and max(rewards(straight).values()) > 0 and straight.weights() != start

    report = straight.report()
    assert report["training"]["questions_per_step"] == 4 and report["data"]["val"] == 6
    assert report["evaluations"][0].keys() == {"step", "reward", "pass@8"}
    single = launch("nanochat", [*options, "--micro_batch_size=0", "--max_steps=2"], name="single").succeed()
    assert rewards(single)[0] == pytest.approx(rewards(straight)[0])
    assert single.losses()[1] == pytest.approx(straight.losses()[1], abs=1e-5)


def test_several_steps_with_the_same_replies_resume_where_new_ones_are_drawn(model, launch):
    options = [*RL, f"--model_dir={model}", "--clip=0.2", "--kl=0.05", "--rollout_updates=2", "--save_steps=1"]
    straight = launch("nanochat", [*options, "--max_steps=6"], name="straight").succeed()
    launch("nanochat", [*options, "--max_steps=6"], name="broken").killed_at(3, 0)
    again = launch("nanochat", [*options, "--max_steps=6"], name="broken").succeed()
    assert list(rewards(straight)) == [0, 2, 4]
    assert rewards(again) == rewards(straight) and again.weights() == straight.weights()
