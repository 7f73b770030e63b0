"""Scores of models that are known: one that guesses is at 0, one that knows the answers has what it knows."""

import json
import random

import pytest
import torch

from ascendrun.programs.nanochat import conversations
from ascendrun.programs.nanochat.base import save_model
from ascendrun.programs.nanochat.evaluation import Pupil, open_tasks, passed, replies, score
from ascendrun.programs.nanochat.inference import open_engine
from tests.programs.conftest import alone
from tests.programs.nanochat.test_nanochat_model import model_of, sizes_of

OPTIONS = {
    "dtype": "float32", "seed": 3, "max_num_seqs": 64, "num_samples": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    "max_new_tokens": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def guesser():
    return pupil_of(*model_of(context=160, layers=1, hidden=32, heads=2, kv_heads=2))


def pupil_of(model, tokenizer):
    here = alone()
    return Pupil(open_engine(model, OPTIONS, here), tokenizer, model.sizes.context, here)


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Two letters are the same question for a model that knows nothing."""
    chance, file = random.Random(1), tmp_path_factory.mktemp("tasks") / "arc.jsonl"
    rows = [
        {"question": f"{number}?", "choices": [str(chance.randint(10, 99)) for _ in range(4)], "answer": number % 4}
        for number in range(800)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tasks_of(*specs):
    return open_tasks(specs, 3)


def test_a_model_that_guesses_scores_0(guesser, questions):
    """Choices by letter: a quarter of them is right by chance."""
    specs = {"kind": "choices", "file": str(questions)}, {"kind": "sums", "rows": 60}, {"kind": "spelling", "rows": 60}
    found = {name: score(guesser, examples, OPTIONS) for name, examples in tasks_of(*specs).items()}
    assert list(found) == ["arc", "sums", "spelling"]
    assert found["arc"]["chance"] == 0.25 and 0.15 < found["arc"]["score"] < 0.35
    assert found["arc"]["generated"] < 0.3
    mean = sum(each["centered"] for each in found.values()) / 3
    assert abs(found["arc"]["centered"]) <= 0.05 and abs(mean) <= 0.05


class Knows(torch.nn.Module):
    """A model of one row that replies what the examples do, and to questions with a number in `wrong` a z."""

    def __init__(self, tokenizer, examples, wrong):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.sizes = sizes_of(vocabulary=tokenizer.get_vocab_size(), context=400)
        self.text, self.next = [], {}
        for number, example in enumerate(examples):
            prompt, (ids, _) = (
                conversations.render_for_completion(tokenizer, example.messages),
                render(tokenizer, example),
            )
            for at in range(len(prompt), len(ids)):
                self.next[tuple(ids[:at])] = tokenizer.token_to_id("z") if number in wrong else ids[at]

    def forward(self, ids, positions=None, cache=None, keep=None):
        is_next = positions is not None and int(positions[0, 0]) > 0
        self.text = [*self.text, int(ids[0, 0])] if is_next else ids[0].tolist()
        logits = torch.zeros(1, len(keep), self.sizes.vocabulary)
        logits[0, :, self.next.get(tuple(self.text), 0)] = 9.0
        return logits


def render(tokenizer, example):
    return conversations.render_conversation(tokenizer, example.messages)


def test_a_model_that_knows_scores_what_it_knows(guesser, questions, tmp_path):
    """It calls the calculator, whose results are put in as the examples have them."""
    file = tmp_path / "gsm.jsonl"
    rows = [("Half of 48 and 48?", "It is 48/2=<<48/2=24>>24. So 24+48=<<24+48=72>>72.\n#### 72")]
    rows += [("And 1.5 times 3?", "That is <<1.5*3=4.5>>4.5\n#### 4.5"), ("Two?", "#### 2")]
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    options = {**OPTIONS, "max_num_seqs": 1, "max_new_tokens": 0, "num_samples": 2, "temperature": 0.01}
    specs = {"kind": "gsm8k", "file": str(file)}, {"kind": "sums", "rows": 4}, {"kind": "spelling", "rows": 6}
    tasks = tasks_of(*specs, {"kind": "choices", "file": str(questions), "rows": 4})
    wanted = {"gsm": 2 / 3, "sums": 3 / 4, "spelling": 5 / 6, "arc": 3 / 4}
    for name, examples in tasks.items():
        pupil = pupil_of(Knows(guesser.tokenizer, examples, {1}), guesser.tokenizer)
        found = score(pupil, examples, options)
        assert found["score"] == pytest.approx(wanted[name]), (name, found)
        assert found.get("pass@2", found.get("generated")) == pytest.approx(wanted[name])
        assert found["centered"] == pytest.approx(2 / 3 if name == "arc" else wanted[name])
        assert found["samples"][0]["number"] == 0


def test_pass_at_k_is_the_chance_of_a_right_one_among_k():
    assert [passed(4, right, 1) for right in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert passed(4, 2, 2) == pytest.approx(5 / 6) and passed(4, 1, 4) == passed(4, 2, 3) == 1


def test_samples_do_not_depend_on_the_other_questions(guesser):
    """Two ranks have half of them each; here the second half is asked alone."""

    (examples,) = tasks_of({"kind": "sums", "rows": 12}).values()
    asked = list(enumerate(examples))
    _, together = replies(guesser, asked, OPTIONS, samples=3)
    _, alone = replies(guesser, asked[1::2], OPTIONS, samples=3)
    assert together[1::2] == alone and len({text for _, text, _ in together}) > 3


def test_ranks_share_the_questions_and_have_the_scores_of_one(launch, guesser, questions, tmp_path):
    """Bits per byte of documents too."""
    save_model(guesser.engine.module, guesser.tokenizer, tmp_path / "model", training={})
    tasks = [{"kind": "choices", "file": str(questions), "rows": 21}, {"kind": "sums", "rows": 9}]
    options = ["--mode=evaluate", f"--model={tmp_path / 'model'}", f"--tasks={json.dumps(tasks)}", "--output_dir=out"]
    options += ["--data_path=generated", "--synthetic_documents=40", f"--data_cache_dir={tmp_path / 'cache'}"]
    options += ["--num_samples=2", "--max_new_tokens=4", "--dtype=float32", "--micro_batch_size=4"]
    found = []
    for ranks in (1, 2):
        run = launch("nanochat", options, ranks=ranks, name=f"ranks-{ranks}").succeed()
        found.append(json.loads((run.folder / "out" / "evaluation.json").read_text()))
        assert run.metrics()[-1]["final_mean_centered"] == found[-1]["mean_centered"]
    single, double = found
    assert single.pop("bits_per_byte") == pytest.approx(double.pop("bits_per_byte"), rel=1e-4)
    assert single.pop("loss") == pytest.approx(double.pop("loss"), rel=1e-4)
    for each in (single, double):
        for scores in each["tasks"].values():
            scores.update({name: round(value, 9) for name, value in scores.items() if isinstance(value, float)})
        each["mean_centered"] = round(each["mean_centered"], 9)
    assert single == double and list(single["tasks"]) == ["arc", "sums"]
    assert single["tasks"]["arc"]["questions"] == 21 and "pass@2" in single["tasks"]["sums"]


def test_code_is_right_if_its_test_passes(tmp_path):
    """The imports of the question are there; a reply may have more text around its code."""
    file = tmp_path / "human.jsonl"
    prompt = "from math import gcd\n\ndef coprime(a, b):\n    "
    test = "def check(f):\n    assert f(4, 9) and not f(4, 6)"
    solution = "return gcd(a, b) == 1"
    row = {"prompt": prompt, "test": test, "entry_point": "coprime", "canonical_solution": solution}
    file.write_text(json.dumps(row) + "\n")
    ((_, (example,)),) = tasks_of({"kind": "code", "file": str(file)}).items()
    body = f"def coprime(a, b):\n    {solution}\n"
    assert example.messages[1]["content"][0]["text"] == prompt + solution
    assert [example.reward(text) for text in (body, f"Here:\n```python\n{body}```\nIt works.")] == [1.0, 1.0]
    for wrong in ("", "def coprime(a, b): return True", "```python\nimport os; os._exit(0)\n```", "not code"):
        assert example.reward(wrong) == 0.0


def test_two_tasks_of_a_kind_have_names_of_their_own():
    assert list(tasks_of({"kind": "sums", "rows": 2}, {"kind": "sums", "rows": 3})) == ["sums", "sums-2"]
