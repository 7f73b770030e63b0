"""A saved model is read again, replies on the terminal and over HTTP, and uses the calculator there."""

import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Completion, Sampling
from ascendrun.programs.generation.terminal import talk
from ascendrun.programs.nanochat import conversations
from ascendrun.programs.nanochat.base import save_model
from ascendrun.programs.nanochat.conversations import TOOL, Tools, decoded, stops_of
from ascendrun.programs.nanochat.inference import OLD_NAMES, open_model, open_talker
from ascendrun.programs.nanochat.texts import of_characters
from tests.programs.conftest import alone
from tests.programs.generating import naive
from tests.programs.nanochat.test_nanochat_model import model_of
from tests.programs.test_chat import post, reply_of, said

OPTIONS = {"dtype": "float32", "temperature": 0.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), "current")


def save(folder, preset):
    """Write a model that often calls the calculator."""
    model, tokenizer = model_of(seed=9, context=128, layers=2, preset=preset)
    with torch.no_grad():
        for mark in TOOL[:2]:
            model.lm_head.weight[tokenizer.token_to_id(mark)] *= 2
    save_model(model, tokenizer, folder, training={})
    return folder, model, tokenizer


def reply(saved, messages, limit):
    """Return the text that the model itself generates, without a cache."""
    _, model, tokenizer = saved
    ids = conversations.render_for_completion(tokenizer, messages)
    found = naive(of_model(model), Completion(ids, limit, Sampling(0.0), stops_of(tokenizer), Tools(tokenizer)))
    return decoded(tokenizer, found)


@pytest.mark.parametrize("preset, is_old", [("current", False), ("current", True), ("classic", False)])
def test_a_saved_model_is_read_as_it_was(preset, is_old, tmp_path):
    folder, model, tokenizer = save(tmp_path, preset)
    if is_old:  # the names of release 0.2.0
        weights = load_file(folder / "model.safetensors")
        for old, new in OLD_NAMES.items():
            weights = {name.replace(new, old): each for name, each in weights.items()}
        assert sum(name.split(".")[-1] in OLD_NAMES for name in weights) == 4
        save_file(weights, folder / "model.safetensors")
    again, words = load_model(folder)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert again.sizes == model.sizes and torch.equal(again(ids), model(ids))
    assert words.to_str() == tokenizer.to_str()


def test_calls_are_shown_as_in_gsm8k(saved):
    _, _, tokenizer = saved
    start, end, output, ended = (tokenizer.token_to_id(mark) for mark in TOOL)
    ids = [*tokenizer.encode("is ").ids, start, *tokenizer.encode("2+3").ids, end, output, *tokenizer.encode("5").ids]
    assert decoded(tokenizer, [*ids, ended, *tokenizer.encode("5.").ids]) == "is <<2+3=5>>5."


def test_the_terminal_keeps_the_chat_until_it_is_cleared(saved, monkeypatch, capsys):
    talker = open_talker({**OPTIONS, "model_dir": str(saved[0])}, alone(), rows=1)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand\n\nclear\nhi\nquit\nnever\n"))
    capsys.readouterr()
    talk(talker, alone(), limit=9)
    first = reply(saved, said("hi"), 9)
    history = [*said("hi"), {"role": "assistant", "content": first}, *said("and")]
    shown = capsys.readouterr().out.split("> ")
    assert shown == ["", f"{first}\n", f"{reply(saved, history, 9)}\n", "", "", f"{first}\n", ""]


def test_one_prompt_gets_one_reply(saved, launch):
    run = launch("nanochat", ["--mode=chat", f"--model={saved[0]}", "-p", "2 and 3", "-t", "0", "--max_new_tokens=12"])
    assert reply(saved, said("2 and 3"), 12) in run.succeed().text()


def test_ranks_serve_the_model(saved, launch):
    """Each with the whole model; the calculator is used over HTTP too."""
    ranks = 2
    run = launch("nanochat", ["--mode=serve", f"--model_dir={saved[0]}", "--port=0", "--max_num_seqs=2"], ranks=ranks)
    line = run.serving()
    texts = [f"what is {number}" for number in range(5)]
    clients = [post((line["host"], line["port"]), messages=said(text), max_tokens=30, temperature=0) for text in texts]
    found = [reply_of(client)[1]["choices"][0]["message"]["content"] for client in clients]
    assert found == [reply(saved, said(text), 30) for text in texts]
    assert reply_of(post((line["host"], line["port"]), messages=[{"role": "assistant", "content": "x"}]))[0] == 400
    for rank in range(ranks):
        run.signal(rank)
    run.succeed()


def test_what_is_not_a_model_is_one_error(saved, tmp_path):
    folder = saved[0]
    assert "program.no-model" in key_of(lambda: load_model(tmp_path / "missing"))
    with_problem = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    for problem in ({"model_type": "qwen2"}, {"hidden_size": 96}, {"num_hidden_layers": 3}):
        (with_problem / "config.json").write_text(json.dumps({**config, **problem}))
        assert key_of(lambda: load_model(with_problem)) == "program.no-model"
    (with_problem / "config.json").write_text("{")
    assert key_of(lambda: load_model(with_problem)) == "program.no-model"
    shutil.copytree(folder, with_problem, dirs_exist_ok=True)
    of_characters(["abc"]).save(str(with_problem / "tokenizer.json"))
    assert key_of(lambda: load_model(with_problem)) == "plan.foreign-tokenizer"
    (with_problem / "model.safetensors").write_bytes(b"damaged")
    assert key_of(lambda: load_model(with_problem)) == "program.no-model"


def load_model(folder):
    return open_model({"model_dir": str(folder)})


def key_of(action) -> str:
    with pytest.raises(InvalidDataError) as refused:
        action()
    return refused.value.args[0].key
