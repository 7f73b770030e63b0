"""The page of a served model in a real browser: a chat as it is generated, DNA for a protein, and nothing else runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import find_browser
from live_browser import Page, open_browser

from ascendrun.programs.codon.files import save_model
from ascendrun.programs.codon.model import Config, make_model
from ascendrun.programs.codon.serve import Service
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.devices.accelerator import open_accelerator
from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.chat import Talker, Team
from ascendrun.programs.generation.engine import Generator, Sampling
from tests.programs.asking import served
from tests.programs.conftest import alone, options_of
from tests.programs.generating import WORDS, Plain

MARKUP = "<img src=x onerror='document.title = 1'> & "
"""What every token of the model is shown as."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.fail("no Chromium here; on Debian apt install chromium", pytrace=False)
    with open_browser(browser, tmp_path / "browser") as found:
        yield found


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a model that needs a token."""
    monkeypatch.setenv("ASCENDRUN_SERVE_TOKEN", "secret")
    torch.manual_seed(0)
    here = alone()
    generator = Generator(of_model(Plain().eval()), torch.device("cpu"), context=120, rows=4)
    prompt_of = lambda messages: [2 + len(each["content"]) % (WORDS - 2) for each in messages]  # noqa: E731
    talker = Talker("tiny", generator, prompt_of, lambda tokens: MARKUP * len(tokens), frozenset(), Sampling(0.0))
    team = Team(talker, here)
    server = team.serve("127.0.0.1", 0)
    thread = threading.Thread(target=team.lead, args=(server,))
    thread.start()
    yield "http://{}:{}/".format(*server.address)
    here.stop_requested = True
    thread.join()


def send(page: Page, form: str, **values: str) -> None:
    fields = "; ".join(f"form.elements.{name}.value = {json.dumps(value)}" for name, value in values.items())
    page.run(f"(() => {{ const form = document.getElementById({form!r}); {fields}; form.requestSubmit() }})()")


def test_a_chat_is_shown_as_text_while_it_is_generated(page: Page, chat: str, tmp_path: Path) -> None:
    page.show_as(360, lang="zh-CN")
    page.open(chat, ready="document.title === 'tiny'")
    assert page.run("document.documentElement.lang") == "zh"
    page.show_as(1280)
    page.open(chat, ready="document.title === 'tiny'")
    send(page, "chat", text="hello", max_tokens="7")
    page.wait("document.getElementById('error').textContent !== ''")
    assert page.run("document.querySelectorAll('.message').length") == 0
    page.run("document.querySelector('#token input').value = 'secret'")
    send(page, "chat", text="hello", max_tokens="7")
    page.wait(f"document.querySelector('.assistant')?.textContent === {(MARKUP * 7)!r}")
    page.wait("document.getElementById('stop').disabled")
    send(page, "chat", text="and then?", max_tokens="2")
    page.wait(f"[...document.querySelectorAll('.assistant')].at(-1).textContent === {(MARKUP * 2)!r}")
    shown = page.run("[...document.querySelectorAll('.message')].map((each) => each.className)")
    assert shown == ["message user", "message assistant"] * 2
    assert page.run("document.title") == "tiny" and page.run("document.images.length") == 0
    page.picture(tmp_path / "chat.png")
    page.run("document.getElementById('new').click()")
    assert page.run("document.querySelectorAll('.message').length") == 0
    assert len(page.complaints) == 1 and "401" in page.complaints[0], page.complaints


def test_a_protein_becomes_dna_and_what_is_wrong_is_shown(page: Page, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    save_model(
        make_model(Config(**sizes, max_position_embeddings=64, initializer_range=0.5), seed=1), ORGANISMS, tmp_path
    )
    cpu = open_accelerator("cpu", 0)
    here: Any = SimpleNamespace(accelerator=cpu, device=cpu.device)
    options = options_of("codon", "--mode=serve", f"--model_path={tmp_path}", "--dtype=float32")
    with served(Service.of(options, here).on_rank()) as address:
        page.show_as(1280)
        page.open("http://{}:{}/".format(*address), ready="!document.getElementById('proteins').hidden")
        send(page, "proteins", protein="MKTV RQ", num_sequences="1", avoid="GAATTC, GGTCTC")
        page.wait("document.querySelector('td.dna')?.textContent.length === 21")
        page.picture(tmp_path / "codon.png")
        send(page, "proteins", protein="M1", organism="nowhere")
        page.wait("document.getElementById('error').textContent.includes('nowhere')")
        assert all("404" in each or "422" in each for each in page.complaints), page.complaints
