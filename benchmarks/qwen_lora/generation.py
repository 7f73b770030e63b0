"""Measures generation: cached against `scoring.answer` of another checkout, which reads the whole text again for each
token, and clients at once against one after the other. Both sides of a ratio are measured in turns in one run.

    python -m benchmarks.qwen_lora.generation --base ../base --preset qwen2.5-0.5b --layers 12 \\
        --out benchmarks/qwen_lora/results/generation.json

../base: a checkout of commit b87d4b6. A token needs all weights once, on either side. The output layer of the 0.5B
shape has more than a quarter of them: fewer layers make the ratio smaller, not the cache slower.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ascendrun.programs.generation.cache import of_transformers
from ascendrun.programs.generation.chat import Talker, Team
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.generation.sampling import Sampling
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.trainer.devices import kernels
from ascendrun.programs.trainer.devices.accelerator import choose_family, open_accelerator
from ascendrun.programs.trainer.runtime import Runtime

GREEDY = Sampling(0.0)
BASE = """
import contextlib, json, sys, time, types
from typing import Any
import torch
torch.set_num_threads(int(sys.argv[2]))
from ascendrun.programs.qwen_lora import base, scoring
from ascendrun.programs.qwen_lora.conversations import Conversation
asked = json.loads(sys.argv[1])
torch.manual_seed(0)
config = base.shape_config(asked["preset"], **({"num_hidden_layers": asked["layers"]} if asked["layers"] else {}))
model = base.build(config, attention="sdpa").eval().to(getattr(torch, asked["dtype"]))
class Tokens:  # prompts are numbers, and nothing ends a reply
    eos_token_id = None
    apply_chat_template = lambda self, *given, **names: ""
    convert_tokens_to_ids = lambda self, name: None
    decode = lambda self, ids, **names: json.dumps(ids)
    __call__ = lambda self, text, **names: {"input_ids": asked["ids"]}
engine = types.SimpleNamespace(module=model, model=model, autocast=contextlib.nullcontext)
here = types.SimpleNamespace(device=torch.device("cpu"), share=lambda value: value)
talk = Conversation((("user", ""), ("assistant", "")))
scoring.answer(engine, Tokens(), talk, here, most=2)
started_s = time.process_time()
found = scoring.answer(engine, Tokens(), talk, here, most=asked["tokens"])
print(json.dumps([round(time.process_time() - started_s, 3), json.loads(found)]))
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", type=Path, help="checkout of b87d4b6, for a CPU; without: its way, in this process")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--layers", type=int, default=0, help="0: those of the preset")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of the first comparison")
    parser.add_argument("--reply", type=int, default=32, help="new tokens of a client's reply")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    asked = parser.parse_args(argv)
    accelerator = open_accelerator(choose_family("auto", {}), 0)
    torch.manual_seed(0)
    dtype, changes = getattr(torch, asked.dtype), {"num_hidden_layers": asked.layers} if asked.layers else {}
    kernels.sound_kernels(accelerator, dtype)
    model = base.build(base.shape_config(asked.preset, **changes)).eval().to(device=accelerator.device, dtype=dtype)
    here = Runtime(0, 0, 1, None, accelerator)
    cached, naive = [], []
    prompt, wanted, found_tokens = prompt_of(asked.prompt), list[int](), list[int]()
    generate_one(model, prompt, 2, here.device)
    for _ in range(asked.rounds):
        if asked.base:
            taken_s, ids = answer_of(asked.base, asked, prompt)
            naive.append(taken_s)
            wanted.extend(ids)
        else:
            naive.append(seconds_of(lambda: wanted.extend(read_again(model, prompt, asked.tokens, here.device))))
        cached.append(seconds_of(lambda: found_tokens.extend(generate_one(model, prompt, asked.tokens, here.device))))
    same = next((at for at, pair in enumerate(zip(wanted, found_tokens)) if pair[0] != pair[1]), asked.tokens)
    alone, together = [], []
    with Service(model, here, asked.prompt + asked.reply + 1, asked.clients) as address:
        for _ in range(asked.rounds):
            alone.append(seconds_of(lambda: ask_all(address, asked, at_once=1)))
            together.append(seconds_of(lambda: ask_all(address, asked, at_once=asked.clients)))
    found = {
        "device": accelerator.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        **{name: value for name, value in vars(asked).items() if name not in ("out", "base")},
        "naive": "scoring.answer of the other checkout" if asked.base else "its way, in this process",
        "first_tokens_that_are_equal": same,
        "naive_s": naive,
        "cached_s": cached,
        "cached_is_faster": round(median(one / other for one, other in zip(naive, cached)), 2),
        "one_after_the_other_s": alone,
        "at_once_s": together,
        "at_once_answers_more": round(median(one / other for one, other in zip(alone, together)), 2),
    }
    print(json.dumps(found, indent=1))
    if asked.out:
        Path(asked.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def seconds_of(work: Any) -> float:
    """Of the clock with a device, of the process without one: other processes of the machine hardly change them."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started_s = clock()
    work()
    return round(clock() - started_s, 3)


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(7 * place + number) % 1900 for place in range(length)]


def generate_one(model: Any, prompt: list[int], count: int, device: torch.device) -> list[int]:
    generator = Generator(of_transformers(model), device, context=len(prompt) + count + 1)
    return generate(generator, [Completion(prompt, count, GREEDY)])[0]


def answer_of(tree: Path, asked: argparse.Namespace, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds and the tokens of `scoring.answer` in the other checkout, for the same weights and prompt."""
    facts = {name: getattr(asked, name) for name in ("preset", "layers", "dtype", "tokens")}
    command = [sys.executable, "-c", BASE, json.dumps({**facts, "ids": prompt}), str(torch.get_num_threads())]
    environ = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    done = subprocess.run(command, env=environ, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    taken_s, ids = json.loads(done.stdout.splitlines()[-1])
    return taken_s, ids


def read_again(model: Any, prompt: list[int], count: int, device: torch.device) -> list[int]:
    """Generate as `scoring.answer` of commit b87d4b6 did: a pass over the whole text for each token."""
    ids, last = list(prompt), torch.tensor([0])
    with torch.no_grad():
        for _ in range(count):
            last[0] = len(ids) - 1
            given = torch.tensor([ids]).to(device)
            ids.append(
                int(model(input_ids=given, logits_to_keep=last.to(device), use_cache=False).logits[0, -1].argmax())
            )
    return ids[len(prompt) :]


class Service:
    """The chat server over a model, in this process."""

    def __init__(self, model: Any, here: Runtime, context: int, rows: int) -> None:
        generator = Generator(of_transformers(model), here.device, context=context, rows=rows)
        talker = Talker("bench", generator, lambda said: json.loads(said[0]["content"]), str, frozenset(), GREEDY)
        self.here, self.team = here, Team(talker, here)
        self.server = self.team.serve("127.0.0.1", 0)
        self.thread = threading.Thread(target=self.team.lead, args=(self.server,))

    def __enter__(self) -> tuple[str, int]:
        self.thread.start()
        return self.server.address

    def __exit__(self, *error: Any) -> None:
        self.here.stop_requested = True
        self.thread.join()


def ask_all(address: tuple[str, int], asked: argparse.Namespace, *, at_once: int) -> None:
    """Send the questions of all clients, `at_once` of them at a time."""

    def ask(number: int) -> None:
        client = http.client.HTTPConnection(*address, timeout=600)
        message = {"role": "user", "content": json.dumps(prompt_of(asked.prompt, number))}
        client.request("POST", "/v1/chat/completions", json.dumps({"messages": [message], "max_tokens": asked.reply}))
        reply = client.getresponse()
        assert reply.status == 200, reply.read()
        assert json.loads(reply.read())["usage"]["completion_tokens"] == asked.reply
        client.close()

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(asked.clients)))


if __name__ == "__main__":
    main()
