"""A chat with a language model on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.chat import Talker, Writing
from ascendrun.programs.generation.engine import Completion
from ascendrun.programs.trainer import runtime
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

FORGET, QUIT = ("/new", "clear"), ("quit", "exit")


def refuse_ranks(here: Runtime) -> None:
    if here.world_size > 1:
        raise InvalidDataError(listed("program.chat-ranks"))


def talk(talker: Talker, here: Runtime, *, limit: int, system: str = "", prompt: str = "") -> None:
    """Chat on standard input and output: one message a line, until `quit` or the end of the input; `clear` forgets the
    chat. `prompt`: the only message, instead of the input."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    generator = talker.generator
    for line in [prompt] if prompt else typed(here):
        if line.strip() in FORGET:
            messages = list(start)
        if not line.strip() or line.strip() in FORGET:
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        asked = talker.prompt_of(messages)
        if len(asked) >= generator.context:
            print(listed("program.chat-context", length=len(asked), context=generator.context))
            messages = list(start)
            continue
        writing = Writing(talker.decode)
        text = Completion(asked, limit or generator.context, talker.sampling, talker.stop, talker.hook)
        generator.add(text)
        while text.ended is None:
            count = len(text.tokens)
            if is_stopped(here):  # ^C ends the reply, not the chat
                here.stop_requested = False
                runtime.listen_for_stop(here)
                generator.cancel(text)
            generator.step()
            print(writing.add(text.tokens[count:], is_last=text.ended is not None), end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": writing.text})


def typed(here: Runtime) -> Iterator[str]:
    """Yield the lines of the standard input until its end, or `quit`."""
    while not here.stop_requested:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() in QUIT:
            return
        yield line


def is_stopped(here: Runtime) -> bool:
    return here.stop_requested
