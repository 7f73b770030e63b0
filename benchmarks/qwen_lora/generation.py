"""Measures generation: batches of prompts with a cache against `scoring.answer` of another checkout, which reads the
whole text of one prompt again for each token; and clients at once against one after the other. Both sides of a ratio
are measured in turns in one run.

    python -m benchmarks.qwen_lora.generation --base ../base --batches 1 8 32 \\
        --out benchmarks/qwen_lora/results/generation.json
    python -m benchmarks.qwen_lora.generation --base ../base --preset qwen2.5-0.5b --rounds 2 --clients 0 \\
        --out benchmarks/qwen_lora/results/generation_0.5b.json

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

from ascendrun.programs.devices import kernels
from ascendrun.programs.devices.accelerator import choose_family, open_accelerator
from ascendrun.programs.generation.cache import of_transformers
from ascendrun.programs.generation.chat import Talker, Team
from ascendrun.programs.generation.engine import Completion, Generator, Sampling, generate
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.trainer.runtime import Runtime

GREEDY = Sampling(0.0)
BASE = """
import contextlib, json, sys, time, types
from typing import Any
import torch
torch.set_num_threads(int(sys.argv[2]))
from ascendrun.programs.qwen_lora import base, scoring
from ascendrun.facts.rows import Conversation
asked = json.loads(sys.argv[1])
torch.manual_seed(0)
config = base.shape_config(asked["preset"], **({"num_hidden_layers": asked["layers"]} if asked["layers"] else {}))
model = base.build(config, attention="sdpa").eval().to(getattr(torch, asked["dtype"]))
class Tokens:  # prompts are numbers, and nothing ends a reply
    eos_token_id = None
    apply_chat_template = lambda self, *given, **names: ""
    convert_tokens_to_ids = lambda self, name: None
    decode = lambda self, ids, **names: json.dumps(ids)
    __call__ = lambda self, text, **names: {"input_ids": prompt}
engine = types.SimpleNamespace(module=model, model=model, autocast=contextlib.nullcontext)
here = types.SimpleNamespace(device=torch.device("cpu"), share=lambda value: value)
talk = Conversation((("user", ""), ("assistant", "")))
prompt = asked["prompts"][0]
scoring.answer(engine, Tokens(), talk, here, most=2)
started_s, found = time.process_time(), []
for prompt in asked["prompts"]:
    found.append(json.loads(scoring.answer(engine, Tokens(), talk, here, most=asked["tokens"])))
print(json.dumps([round(time.process_time() - started_s, 3), found]))
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
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="prompts of the first comparison")
    parser.add_argument("--clients", type=int, default=32, help="0: measure no server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="")
    asked = parser.parse_args(argv)
    accelerator = open_accelerator(choose_family("auto", {}), 0)
    torch.manual_seed(0)
    dtype, changes = getattr(torch, asked.dtype), {"num_hidden_layers": asked.layers} if asked.layers else {}
    kernels.sound_kernels(accelerator, dtype)
    model = base.build(base.shape_config(asked.preset, **changes)).eval().to(device=accelerator.device, dtype=dtype)
    here = Runtime(0, 0, 1, None, accelerator)
    generate_all(model, [prompt_of(asked.prompt)], 2, here.device)
    facts = {
        "device": accelerator.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{name: value for name, value in vars(asked).items() if name not in ("out", "base", "batches")},
        "naive": "scoring.answer of the other checkout" if asked.base else "its way, in this process",
    }
    batches = [Batch(count) for count in asked.batches]
    for _ in range(asked.rounds):
        for batch in batches:
            batch.measure(model, asked, here.device)
        write({**facts, "batches": [batch.found() for batch in batches]}, asked.out)  # what there is, if it is ended
    if asked.clients:
        alone, together = [], []
        with Service(model, here, asked.prompt + asked.reply + 1, asked.clients) as address:
            for _ in range(asked.rounds):
                alone.append(timed(lambda: ask_all(address, asked, at_once=1))[0])
                together.append(timed(lambda: ask_all(address, asked, at_once=asked.clients))[0])
        served = {
            "one_after_the_other_s": alone,
            "at_once_s": together,
            "at_once_answers_more": round(median(one / other for one, other in zip(alone, together)), 2),
        }
        write({**facts, "batches": [batch.found() for batch in batches], **served}, asked.out)


def write(found: dict[str, Any], out: str) -> None:
    text = json.dumps(found, indent=1)
    print(text, flush=True)
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")


def timed(work: Any) -> tuple[float, Any]:
    """Return the seconds and the result. Seconds of the clock with a device, of the process without one: other
    processes of the machine hardly change them."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started_s = clock()
    result = work()
    return round(clock() - started_s, 3), result


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(7 * place + number) % 1900 for place in range(length)]


class Batch:
    """Replies to `count` prompts: without a cache, one prompt after the other, and with one, all together."""

    def __init__(self, count: int) -> None:
        self.count, self.equal = count, sys.maxsize
        self.naive_s: list[float] = []
        self.cached_s: list[float] = []
        self.loads: list[float] = []

    def measure(self, model: Any, asked: argparse.Namespace, device: torch.device) -> None:
        prompts = [prompt_of(asked.prompt, number) for number in range(self.count)]
        self.loads.append(round(os.getloadavg()[0], 1))
        if asked.base:
            taken_s, wanted = answers_of(asked.base, asked, prompts)
        else:
            taken_s, wanted = timed(lambda: [read_again(model, each, asked.tokens, device) for each in prompts])
        self.naive_s.append(taken_s)
        taken_s, found = timed(lambda: generate_all(model, prompts, asked.tokens, device))
        self.cached_s.append(taken_s)
        for two in zip(wanted, found):
            self.equal = min(self.equal, next((at for at, (a, b) in enumerate(zip(*two)) if a != b), asked.tokens))

    def found(self) -> dict[str, Any]:
        ratios = [one / other for one, other in zip(self.naive_s, self.cached_s)]
        return {
            "prompts": self.count,
            "first_tokens_that_are_equal": self.equal,
            "naive_s": self.naive_s,
            "cached_s": self.cached_s,
            "load": self.loads,
            "ratios": [round(ratio, 2) for ratio in ratios],
            "cached_is_faster": round(median(ratios), 2),
        }


def generate_all(model: Any, prompts: Sequence[list[int]], count: int, device: torch.device) -> list[list[int]]:
    generator = Generator(of_transformers(model), device, context=len(prompts[0]) + count + 1)
    return generate(generator, [Completion(prompt, count, GREEDY) for prompt in prompts])


def answers_of(tree: Path, asked: argparse.Namespace, prompts: Sequence[list[int]]) -> tuple[float, list[list[int]]]:
    """Return the seconds and the tokens of `scoring.answer` in the other checkout, for the same weights and prompts."""
    facts = {name: getattr(asked, name) for name in ("preset", "layers", "dtype", "tokens")}
    command = [sys.executable, "-c", BASE, json.dumps({**facts, "prompts": prompts}), str(torch.get_num_threads())]
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
