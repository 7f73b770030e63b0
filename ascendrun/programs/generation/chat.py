"""Chats with a language model: OpenAI's /v1/chat/completions on all ranks, and a terminal."""

from __future__ import annotations

import json
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ascendrun.programs.generation import requests
from ascendrun.programs.generation.engine import Completion, Generator, Sampling
from ascendrun.programs.generation.server import Server, ending, not_listening
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text, listed

MOST_CHOICES, MOST_STOPS = 8, 4
UNKNOWN = "\ufffd"
"""What a decoder shows for a character whose bytes are not complete yet."""
LATE_S = 2.0
"""Seconds before the last moment of a stopped server, in which texts that are not complete end as they are."""
REFUSED = (
    *("tools", "functions", "logprobs", "response_format", "audio"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
"""Fields of OpenAI's that are not supported: a value that asks for something is an error."""
FIELDS = (
    *("messages", "model", "max_completion_tokens", "max_tokens", "n", "seed", "stop", "stream", "stream_options"),
    *("temperature", "top_p", "top_k", "user"),
)


@dataclass(frozen=True)
class Talker:
    """A model to talk to. `prompt_of`: the tokens of messages up to the reply; `decode`: the text of tokens. `stop`:
    tokens that end a reply. `sampling`: used where a request has no other. `hook`: of `Completion`."""

    name: str
    generator: Generator
    prompt_of: Callable[[Sequence[Any]], list[int]]
    decode: Callable[[Sequence[int]], str]
    stop: frozenset[int]
    sampling: Sampling = Sampling()
    hook: Callable[[Completion], Sequence[int]] | None = None


@dataclass
class Writing:
    """The text of a reply that is being generated, shown as soon as it cannot change. `stops`: texts that end it."""

    decode: Callable[[Sequence[int]], str]
    stops: Sequence[str] = ()
    tokens: list[int] = field(default_factory=list)
    start: int = 0
    read: int = 0
    held: str = ""
    text: str = ""
    is_stopped: bool = False

    def add(self, tokens: Sequence[int], *, is_last: bool) -> str:
        """Return the new text; what may begin a stop is held back until more is known."""
        self.tokens += tokens
        before, after = self.decode(self.tokens[self.start : self.read]), self.decode(self.tokens[self.start :])
        if is_last or not after.endswith(UNKNOWN):
            self.held += after[len(before) :]
            self.start, self.read = self.read, len(self.tokens)
        if self.is_stopped:
            return ""
        found = [at for at in map(self.held.find, self.stops) if at >= 0]
        shown = self.held
        if found:
            self.is_stopped, shown = True, self.held[: min(found)]
        elif not is_last:
            shown = self.held[: len(self.held) - beginning(self.held, self.stops)]
        self.held = self.held[len(shown) :]
        self.text += shown
        return shown


def beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that a stop begins with."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@dataclass(frozen=True)
class Question:
    """A request for replies, read and checked."""

    prompt: list[int]
    samplings: list[Sampling]
    limit: int
    stops: list[str]
    streams: bool
    with_usage: bool


class Reader:
    """Reads bodies of /v1/chat/completions. Raises RequestRefusedError."""

    def __init__(self, talker: Talker) -> None:
        self.talker, self.turn = talker, threading.Lock()

    def __call__(self, body: bytes) -> Question:
        asked = requests.read_json(body)
        refused = [name for name in REFUSED if asked.get(name)]
        if refused:
            raise wrong(listed("program.chat-refused", names=refused))
        requests.refuse_unknown({name: value for name, value in asked.items() if name not in REFUSED}, FIELDS)
        given = self.talker.sampling
        number = self.number
        limit = next((name for name in ("max_completion_tokens", "max_tokens") if asked.get(name) is not None), None)
        seed = number(asked, "seed", None, 0, 2**63 - 1, whole=True)
        first = int(seed if seed is not None else uuid.uuid4().int >> 65)
        common = {
            "temperature": number(asked, "temperature", given.temperature, 0, 2),
            "top_p": number(asked, "top_p", given.top_p, 0, 1),
            "top_k": number(asked, "top_k", given.top_k, 0, 2**31, whole=True),
        }
        count = number(asked, "n", 1, 1, MOST_CHOICES, whole=True)
        most = number(asked, limit, None, 1, 2**31, whole=True) if limit else self.talker.generator.context
        stops = asked.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(x, str) and x for x in stops):
            raise wrong(listed("program.chat-stop", most=MOST_STOPS))
        options = asked.get("stream_options")
        return Question(
            self.prompt(messages_of(asked.get("messages"))),
            [Sampling(seed=first + choice, **common) for choice in range(count)],
            most,
            stops,
            bool(asked.get("stream", False)),
            isinstance(options, dict) and bool(options.get("include_usage", False)),
        )

    def number(self, asked: Any, name: str, default: Any, least: float, most: float, *, whole: bool = False) -> Any:
        value = asked.get(name)
        if value is None:
            return default
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise wrong(listed("program.chat-number", name=name, least=least, most=most))
        return value

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        context = self.talker.generator.context
        try:
            with self.turn:
                prompt = self.talker.prompt_of(messages)
        except Exception as error:  # of the chat template: other roles, another order
            raise wrong(listed("program.chat-template", error=str(error))) from None
        if len(prompt) >= context:
            raise wrong(listed("program.chat-context", length=len(prompt), context=context))
        return prompt


def messages_of(given: Any) -> list[dict[str, str]]:
    """Return messages with plain texts; a content may be a list of parts of type text."""
    messages: list[dict[str, str]] = []
    for each in given if isinstance(given, list) else []:
        role, content = (each.get("role"), each.get("content")) if isinstance(each, dict) else (None, None)
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            messages = []
            break
        messages.append({"role": role, "content": content})
    if not messages:
        raise wrong(listed("program.chat-messages"))
    return messages


def wrong(message: Text) -> requests.RequestRefusedError:
    return requests.RequestRefusedError(400, message)


def openai_error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Reply:
    """The reply to a request while it is generated: one writing for each of its choices."""

    def __init__(self, request: requests.Request, talker: Talker) -> None:
        self.request, self.talker, self.question = request, talker, request.content
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.writings = [Writing(talker.decode, self.question.stops) for _ in self.question.samplings]
        self.reasons: dict[int, str] = {}
        if self.question.streams:
            for choice in range(len(self.writings)):
                self.send(choice, {"role": "assistant", "content": ""})

    def add(self, choice: int, tokens: Sequence[int], ended: str | None) -> bool:
        """Add tokens of a choice; return whether more of them are needed."""
        if choice in self.reasons:
            return False
        writing = self.writings[choice]
        shown = writing.add(tokens, is_last=ended is not None)
        if writing.is_stopped:
            ended = "stop"
        if self.question.streams and shown:
            self.send(choice, {"content": shown})
        if ended is None:
            return True
        self.reasons[choice] = ended
        if self.question.streams and ended != "error":
            self.send(choice, {}, reason=ended)
        if len(self.reasons) == len(self.writings):
            self.end()
        return False

    def end(self) -> None:
        if "error" in self.reasons.values():
            message = listed("program.chat-not-finite")
            self.request.refuse(500, message)
        elif self.question.streams:
            if self.question.with_usage:
                self.event({"choices": [], "usage": self.usage()})
            self.request.send("data: [DONE]\n\n")
            self.request.end()
        else:
            choices = [
                {
                    "index": choice,
                    "message": {"role": "assistant", "content": writing.text},
                    "finish_reason": self.reasons[choice],
                }
                for choice, writing in enumerate(self.writings)
            ]
            found = {"object": "chat.completion", **self.head(), "choices": choices, "usage": self.usage()}
            self.request.reply(found)

    def send(self, choice: int, delta: dict[str, str], *, reason: str | None = None) -> None:
        self.event({"choices": [{"index": choice, "delta": delta, "finish_reason": reason}]})

    def event(self, content: dict[str, Any]) -> None:
        self.request.send(f"data: {json.dumps({'object': 'chat.completion.chunk', **self.head(), **content})}\n\n")

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.talker.name}

    def usage(self) -> dict[str, int]:
        read, written = len(self.question.prompt), sum(len(each.tokens) for each in self.writings)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Team:
    """The ranks that serve a model together: rank 0 has the requests, and every rank generates some of the texts."""

    def __init__(self, talker: Talker, here: Runtime) -> None:
        self.talker, self.here, self.generator = talker, here, talker.generator
        self.texts: dict[tuple[int, int], tuple[Completion, int]] = {}
        """Texts of this rank by reply and choice, and how many of their tokens were reported."""
        self.replies: dict[int, Reply] = {}
        """Of rank 0."""
        self.loads = [0] * here.world_size
        self.home: dict[tuple[int, int], int] = {}
        self.number = 0

    def serve(self, host: str, port: int, *, limits: requests.Limits | None = None) -> Server:
        """Create the server of rank 0, which listens and does not serve yet. Raises OSError."""
        models = {"object": "list", "data": [{"id": self.talker.name, "object": "model", "owned_by": "ascendrun"}]}
        server = Server(
            host,
            port,
            pages={
                "/health": lambda: {"status": "ok", "waiting": server.queue.waiting - 1},
                "/v1/models": lambda: models,
            },
            routes={"/v1/chat/completions": Reader(self.talker)},
            error=openai_error,
            limits=limits,
        )
        return server

    def lead(self, server: Server) -> bool:
        """Serve on rank 0 until the stop signal. Return whether all requests have a reply."""
        has_answered = server.serve(lambda: self.here.stop_requested, lambda wait_s: self.work(server, wait_s))
        self.here.share({"over": True})
        return has_answered

    def follow(self) -> None:
        """Generate on another rank until rank 0 ends."""
        nothing: dict[str, Any] = {}
        while not (plan := self.here.share(nothing))["over"]:
            self.round(plan)

    def work(self, server: Server, wait_s: float) -> None:
        """Take new requests, let all ranks generate, and pass on what they did."""
        plan: dict[str, Any] = {"over": False, "add": [], "cancel": [], "ends": False}
        for request in server.queue.take(self.generator.most_rows, 0.0 if self.home else wait_s):
            self.number += 1
            self.replies[self.number] = reply = Reply(request, self.talker)
            for choice, sampling in enumerate(reply.question.samplings):
                rank = self.loads.index(min(self.loads))
                self.home[self.number, choice] = rank
                self.loads[rank] += 1
                plan["add"].append((rank, (self.number, choice), reply.question.prompt, reply.question.limit, sampling))
        plan["cancel"] = [
            (number, choice)
            for number, choice in self.home
            if self.replies[number].request.is_gone or choice in self.replies[number].reasons
        ]
        plan["ends"] = server.deadline_s is not None and time.monotonic() > server.deadline_s - LATE_S
        try:
            events = [event for part in self.round(plan) for event in part]
        except Exception:
            if self.here.world_size > 1:  # the other ranks are in the middle of a pass
                raise
            traceback.print_exc()
            self.fail()
            return
        for key, tokens, ended in events:
            reply = self.replies[key[0]]
            if not reply.request.is_gone:
                reply.add(key[1], tokens, ended)
            if ended:
                self.loads[self.home.pop(key)] -= 1
                if not any(other[0] == key[0] for other in self.home):
                    del self.replies[key[0]]

    def fail(self) -> None:
        """Reply to all requests after an error, such as too little memory, and continue without them."""
        for reply in self.replies.values():
            reply.request.refuse(500, requests.failed())
        self.replies, self.home, self.texts, self.loads = {}, {}, {}, [0]
        self.generator.clear()

    def round(self, plan: dict[str, Any]) -> list[list[Any]]:
        """Follow a plan on every rank. Return the new tokens of each rank's texts."""
        if self.here.is_first:
            self.here.share(plan)
        for rank, key, prompt, limit, sampling in plan["add"]:
            if rank == self.here.rank:
                text = Completion(prompt, limit, sampling, self.talker.stop, self.talker.hook)
                self.texts[key] = text, 0
                self.generator.add(text)
        for key, (text, _) in self.texts.items():
            if key in plan["cancel"]:
                self.generator.cancel(text)
            elif plan["ends"]:
                self.generator.cancel(text, "length")
        self.generator.step()
        events = []
        for key, (text, count) in list(self.texts.items()):
            if len(text.tokens) > count or text.ended:
                events.append((key, text.tokens[count:], text.ended))
                self.texts[key] = text, len(text.tokens)
            if text.ended:
                del self.texts[key]
        return self.here.gather(events)


def serve(talker: Talker, here: Runtime, *, host: str, port: int) -> None:
    """Serve /v1/chat/completions on rank 0's node until the stop signal; all ranks generate."""
    team = Team(talker, here)
    server, problem = None, ""
    if here.is_first:
        try:
            server = team.serve(host, port)
        except OSError as error:
            problem = error.strerror or str(error)
    problem = here.share(problem)
    if problem:
        raise not_listening(host, port, problem)
    if server is None:
        team.follow()
        here.record(done=True)
        return
    host, port = server.address
    here.log(listed("program.chat-serving", model=talker.name, host=host, port=port))
    here.record(event="serving", host=host, port=port)
    has_answered = team.lead(server)
    here.record(done=True)
    here.log(ending(server, has_answered))
