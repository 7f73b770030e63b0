"""Chats over HTTP: OpenAI's format, streams, stops, limits; and a base with its adapter, on one and two ranks."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from typing import Any

import pytest
import torch

from ascendrun.programs.generation import chat
from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.chat import Reader, Talker, Team, Writing
from ascendrun.programs.generation.engine import Completion, Generator, Sampling
from ascendrun.programs.generation.requests import Limits, RequestRefusedError
from ascendrun.programs.generation.terminal import talk
from tests.lib.vcluster.processes import await_that
from tests.programs.conftest import alone
from tests.programs.generating import WORDS, Plain, naive

GREEDY = Sampling(0.0)
LETTERS = "\0\1" + "".join(chr(48 + i) for i in range(WORDS - 2))


def decode(tokens):
    return "".join(LETTERS[each] for each in tokens)


def prompt_of(messages):
    if messages[0]["role"] == "nobody":
        raise ValueError("unknown role")
    return [2 + ord(letter) % (WORDS - 2) for each in messages for letter in each["content"]]


@pytest.fixture
def talker():
    torch.manual_seed(0)
    call = of_model(Plain().eval())
    generator = Generator(call, torch.device("cpu"), context=120, rows=32)
    return Talker("tiny", generator, prompt_of, decode, frozenset(), GREEDY)


class World:
    """A team of one rank that serves."""

    def __init__(self, talker: Talker, **limits: Any) -> None:
        self.here = alone()
        self.team = Team(talker, self.here)
        self.server = self.team.serve("127.0.0.1", 0, limits=Limits(**limits))
        self.ended: list[bool] = []
        self.thread = threading.Thread(target=lambda: self.ended.append(self.team.lead(self.server)))

    def post(self, **body: Any) -> http.client.HTTPConnection:
        return post(self.server.address, **body)

    def __enter__(self) -> World:
        self.thread.start()
        return self

    def stop(self) -> bool:
        self.here.stop_requested = True
        self.thread.join(200)
        return self.ended[0]

    def __exit__(self, *error: Any) -> None:
        self.stop()


def post(address: tuple[str, int], **body: Any) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection(*address, timeout=200)
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return client


def reply_of(client: http.client.HTTPConnection) -> tuple[int, Any]:
    reply = client.getresponse()
    found = reply.status, json.loads(reply.read())
    client.close()
    return found


def events_of(client: http.client.HTTPConnection) -> list[Any]:
    raw = client.getresponse().read().decode()
    client.close()
    lines = raw.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[len("data: ") :]) for line in lines[:-2]]


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def wanted(talker: Talker, text: str, limit: int, sampling: Sampling = GREEDY) -> str:
    return decode(naive(talker.generator.call, Completion(prompt_of(said(text)), limit, sampling, talker.stop)))


def test_a_reply_is_that_of_the_model_in_openais_format(talker):
    with World(talker) as world:
        status, found = reply_of(world.post(model="x", messages=said("hello"), max_tokens=9))
    (choice,) = found["choices"]
    assert status == 200 and found["object"] == "chat.completion" and found["model"] == "tiny"
    assert choice["message"] == {"role": "assistant", "content": wanted(talker, "hello", 9)}
    assert choice["finish_reason"] == "length" and choice["index"] == 0
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}


def test_a_stream_has_the_same_text_in_parts(talker):
    with World(talker) as world:
        parts = events_of(
            world.post(
                messages=said("hello"), max_completion_tokens=9, stream=True, stream_options={"include_usage": True}
            )
        )
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in parts[:-1]) == wanted(talker, "hello", 9)
    assert len(parts) > 5 and {each["object"] for each in parts} == {"chat.completion.chunk"}
    assert parts[-2]["choices"][0]["finish_reason"] == "length" and parts[-1]["usage"]["completion_tokens"] == 9


def test_a_seed_repeats_a_drawn_text_and_choices_differ(talker):
    asked = {"messages": said("hello"), "max_tokens": 12, "temperature": 1.0, "top_p": 1, "seed": 5}
    with World(talker) as world:
        (_, one), (_, two) = (reply_of(world.post(**asked)) for _ in range(2))
        _, three = reply_of(world.post(**asked, n=3))
    texts = [each["message"]["content"] for each in three["choices"]]
    assert one["choices"] == two["choices"] and texts[0] == one["choices"][0]["message"]["content"]
    assert len(set(texts)) == 3 and texts[2] == wanted(talker, "hello", 12, Sampling(1.0, seed=7))


def test_clients_at_once_share_passes_and_get_their_own_replies(talker):
    """32 replies of 20 tokens: far fewer passes than one after the other, which would be 640."""
    world = World(talker)
    clients = [world.post(messages=said(f"ship {number}"), max_tokens=20) for number in range(32)]
    with world:
        found = [reply_of(client)[1]["choices"][0]["message"]["content"] for client in clients]
    assert found == [wanted(talker, f"ship {number}", 20) for number in range(32)]
    assert talker.generator.passes <= 60


def test_a_stop_text_ends_a_reply_before_it_and_is_never_shown(talker):
    whole = wanted(talker, "hello", 30)
    stop = whole[7:10]
    with World(talker) as world:
        _, found = reply_of(world.post(messages=said("hello"), max_tokens=30, stop=stop))
        parts = events_of(world.post(messages=said("hello"), max_tokens=30, stop=[stop, "never"], stream=True))
    text = whole[: whole.index(stop)]
    assert found["choices"][0]["message"]["content"] == text and found["choices"][0]["finish_reason"] == "stop"
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in parts) == text


def test_a_client_that_leaves_a_stream_frees_its_row(talker):
    talker.generator.context = 100_000
    torch.manual_seed(0)
    with World(talker) as world:
        client = world.post(messages=said("hello"), stream=True, max_tokens=400)
        client.getresponse().read(10)
        client.close()
        await_that(lambda: not world.team.home and not talker.generator.active, lambda: str(world.team.home))
        assert reply_of(world.post(messages=said("hello"), max_tokens=3))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": said("x" * 120)},
        {"messages": said("x"), "max_tokens": 0},
        {"messages": said("x"), "max_tokens": 1.5},
        {"messages": said("x"), "temperature": "hot"},
        {"messages": said("x"), "temperature": float("nan")},
        {"messages": said("x"), "top_p": 2},
        {"messages": said("x"), "n": 99},
        {"messages": said("x"), "n": True},
        {"messages": said("x"), "stop": [""]},
        {"messages": said("x"), "stop": 3},
        {"messages": said("x"), "tools": [{}]},
        {"messages": said("x"), "presence_penalty": 0.5},
        {"messages": said("x"), "temprature": 0.5},
    ],
)
def test_wrong_requests_are_refused(talker, body):
    with pytest.raises(RequestRefusedError) as refused:
        Reader(talker)(json.dumps(body).encode())
    assert refused.value.status == 400 and str(refused.value)


def test_parts_of_text_and_the_context_are_read(talker):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    found = Reader(talker)(json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 5000}).encode())
    assert found.prompt == prompt_of(said("hello")) and found.limit == 5000
    with World(talker) as world:
        _, reply = reply_of(world.post(messages=said("hello"), max_tokens=5000))
        status, refused = reply_of(world.post(messages=said("x" * 500)))
    assert reply["usage"]["total_tokens"] <= 120
    assert status == 400 and refused["error"]["type"] == "invalid_request_error"


def test_a_stop_under_load_answers_all_that_was_taken(talker):
    world = World(talker, answer_s=600.0)
    clients = [
        world.post(messages=said(f"ship {number}"), max_tokens=40, stream=number % 2 == 1) for number in range(40)
    ]
    with world:
        await_that(lambda: bool(world.team.home), lambda: "nothing was taken")
        assert world.stop()
    for number, client in enumerate(clients):
        if number % 2:
            text = "".join(each["choices"][0]["delta"].get("content", "") for each in events_of(client))
        else:
            text = reply_of(client)[1]["choices"][0]["message"]["content"]
        assert text == wanted(talker, f"ship {number}", 40)


def test_texts_that_are_too_long_for_the_stop_end_as_they_are(talker, monkeypatch):
    monkeypatch.setattr(chat, "LATE_S", 59.5)
    talker.generator.context = 10_000
    call = talker.generator.call
    talker.generator.call = lambda ids, positions, cache, keep: call(ids, positions % 500, cache, keep)
    with World(talker, answer_s=60.0) as world:
        client = world.post(messages=said("hello"), max_tokens=9000, stop=["never"])
        await_that(lambda: bool(world.team.home), lambda: "nothing was taken")
        assert world.stop()
        status, found = reply_of(client)
    assert status == 200 and found["choices"][0]["finish_reason"] in ("length", "stop")


def test_an_error_of_the_model_is_replied_and_the_service_goes_on(talker, capfd):
    call = talker.generator.call

    def broken(ids, positions, cache, keep):
        if ids.shape[1] == 7:
            raise RuntimeError("out of memory")
        return call(ids, positions, cache, keep)

    talker.generator.call = broken
    with World(talker) as world:
        assert reply_of(world.post(messages=said("seven77"), max_tokens=5))[0] == 500
        status, found = reply_of(world.post(messages=said("hello"), max_tokens=5))
    talker.generator.call = call
    assert status == 200 and found["choices"][0]["message"]["content"] == wanted(talker, "hello", 5)
    assert "out of memory" in capfd.readouterr().err


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_of_several_tokens_are_shown_when_they_are_complete(size):
    raw = "船 sails é 🚢 end".encode()

    def of_bytes(tokens):
        return bytes(tokens).decode("utf-8", errors="replace")

    writing = Writing(of_bytes, ["end"])
    shown = [writing.add(raw[at : at + size], is_last=at + size >= len(raw)) for at in range(0, len(raw), size)]
    assert "".join(shown) == writing.text == "船 sails é 🚢 " and writing.is_stopped


def test_the_terminal_keeps_the_chat_until_it_is_told_to_forget_it(talker, monkeypatch, capsys):
    import io

    here = alone()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n/new\nship\n" + "x" * 200 + "\n"))
    talk(talker, here, limit=6)
    lines = capsys.readouterr().out.split("> ")
    assert lines[1] == wanted(talker, "hello", 6) + "\n" and lines[4] == wanted(talker, "ship", 6) + "\n"
    assert "200" in lines[5] or "tokens" in lines[5]


# --- a base and its adapter ---


@pytest.fixture(scope="module")
def tuned(fork_server, tmp_path_factory):
    from tests.programs.conftest import Run
    from tests.programs.test_qwen_runs import TINY

    folder = tmp_path_factory.mktemp("tuned")
    return Run(fork_server, folder, [*TINY, "--learning_rate=0.001"], 1, {}, (), "qwen_lora").succeed().folder / "out"


@pytest.mark.thorough
@pytest.mark.parametrize("ranks, strategy", [(1, "auto"), (2, "fsdp2"), (2, "ddp")])
def test_ranks_serve_the_base_with_its_adapter(launch, tuned, ranks, strategy):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tuned / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tuned / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, str(tuned / "adapter")).eval()

    parts = {"return_dict_in_generate": True, "output_scores": True}
    ends = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|endoftext|>", "<|im_end|>")]

    def expected(text):
        ids = tokenizer.apply_chat_template(
            said(text), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            found = model.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=ends, **parts)
        assert min(-each.topk(2).values.diff() for each in found.scores) > 1e-3, "nearly a tie"
        return tokenizer.decode(found.sequences[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    run = launch(
        "qwen_lora",
        ["--mode=serve", f"--base_model={tuned / 'base'}", f"--adapter_path={tuned / 'adapter'}", "--port=0"]
        + ["--max_model_len=256", "--max_num_seqs=4", f"--strategy={strategy}"],
        ranks=ranks,
        name="serve",
    )
    line = run.serving()
    address = line["host"], line["port"]
    questions = ["What is 0?", "What is 2?", "What is 3?", "Explain a ring", "one two three"]
    clients = [post(address, messages=said(text), max_tokens=12, temperature=0) for text in questions]
    found = [reply_of(client)[1]["choices"][0]["message"]["content"] for client in clients]
    assert found == [expected(text) for text in questions] and len(set(found)) > 3
    for rank in range(ranks):
        run.signal(rank, signal.SIGTERM)
    assert '"done": true' in run.succeed().metrics_files[0].read_text()
