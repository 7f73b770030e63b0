"""Parser of Python tracebacks in a stream: exceptions, their chains, and lines of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ascendrun.ascend.vocabularies import alike, is_warning, may_raise, says, wording
from ascendrun.core.dataclass import dataclass
from ascendrun.health.cut_frames import PREFIXED
from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.result import normalised

_PREFIX = re.compile(r"^(?:\[(?:rank(?P<rank>\d+)\]:?|[A-Za-z_]*\d+\]:) ?|\((?:[\w.:=-]+ )*pid=\d+[^)]*\) ?)+")
_BOX = ("│", "╭", "╰", "└", "┌")
_TRACEBACK, _FRAME, _BOXED_FRAME = map(wording, ("traceback", "frame", "boxed-frame"))
_SURE, _ANY, _BARE = wording("exception"), wording("name-and-message"), wording("bare-exception")
TRACEBACK_HEAD = "Traceback (most recent call last)"
_DURING = "During handling of the above exception, another exception occurred"
_DIRECT = "The above exception was the direct cause of the following exception"
FRAME_INDENT = 2
TORN_LINES, WRAPPED_LINES, WRAPPED_FROM = 8, 4, 60
NOISE_LIMIT = 60
"""Maximum number of unrelated lines inside a traceback; with more it counts as torn."""


@dataclass(frozen=True)
class Raised:
    """One exception. `where`: the last frame outside of libraries, else the last frame: "train.py:57".
    `collective`: it is from torch.distributed or a layer below. `first`, `last`: indices in the lines searched.
    `during`: raised while the previous exception of its chain was handled, and not "from" that.
    `caught_in`, `raised_in`: file and function of its first and of its last frame, `statement`: its code.
    `files`: of its frames, the deepest first; `below`: those below the program's own."""

    type: str
    message: str
    where: str | None
    collective: bool
    first: int
    last: int
    during: bool = False
    caught_in: tuple[str, str] = ("", "")
    raised_in: tuple[str, str] = ("", "")
    statement: str = ""
    below: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def short_type(self) -> str:
        return self.type.rpartition(".")[2]

    @property
    def was_uncaught(self) -> bool:
        """Return whether it passed the outermost line of a program."""
        return self.caught_in[1] == "<module>"

    @property
    def is_of_helper(self) -> bool:
        """Return whether a helper process lost its parent, by its class and its first frame."""
        is_inside = "multiprocessing/" in self.caught_in[0] and not self.was_uncaught
        return is_inside and self.type in alike("lost-parent")

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True)
class Chain:
    """Exceptions that led to each other, the first cause first. `rank`: named by a "[rank3]:" prefix.
    `kind`: main, thread, ignored (Python printed it and continued), torn (its traceback is incomplete), bare (without).
    `begins`, `ends`: the part that led to the end: earlier ones were handled, later ones failed in handling it.
    `is_argued`: this part is uncertain."""

    raised: tuple[Raised, ...]
    rank: int | None = None
    kind: str = "main"
    begins: int = 0
    ends: int | None = None
    is_argued: bool = False

    @property
    def root(self) -> Raised:
        return self.raised[self.begins]

    @property
    def leading(self) -> tuple[Raised, ...]:
        return self.raised[self.begins : self.ends]

    @property
    def final(self) -> Raised:
        return self.leading[-1]

    @property
    def first(self) -> int:
        return min(one.first for one in self.raised)

    @property
    def last(self) -> int:
        return max(one.last for one in self.raised)


def same_exception(chain: Chain) -> str:
    """Return a key that is equal for one exception on several ranks."""
    return f"{chain.root.type}|{chain.root.where}|{normalised(chain.root.message)}"


def split_prefix(text: str) -> tuple[str | None, int | None, str]:
    """Return ("[rank3]:", 3, rest) for lines of torch, ("[default0]:", None, rest) for those of torchrun and behind the
    "(name pid=9)" of Ray and vLLM; (None, None, text) for others."""
    found = _PREFIX.match(text) if text[:1] in ("[", "(") else None
    if found is None:
        return None, None, text
    return found.group().rstrip(), None if found["rank"] is None else int(found["rank"]), text[found.end() :]


def read_chains(lines: Sequence[Line]) -> tuple[tuple[Chain, ...], list[int]]:
    """Return every chain of exceptions, by its last line, and the lines of tracebacks that have lost a part."""
    groups: dict[tuple[str, str | None, int | None], list[tuple[int, str]]] = {}  # of each stream, and its ranks
    for index, line in enumerate(lines):
        prefix, rank, text = split_prefix(line.text)
        groups.setdefault((line.stream, prefix, rank), []).append((index, text))
    found: list[Chain] = []
    torn: list[int] = []
    for (_, _, rank), group in groups.items():
        parser = _Parser(group)
        found.extend(replace(chain, rank=rank) for chain in parser.chains())
        torn.extend(parser.torn)
    return tuple(sorted(found, key=lambda chain: chain.last)), sorted(torn)


def bare_chain(lines: Sequence[Line], at: int) -> Chain | None:
    """Return the exception that a line names without a traceback, behind any prefix; with the next lines if the message
    is wrapped. None: it names none, or is a warning or of a launcher."""
    _, rank, text = split_prefix(lines[at].text)
    found = _BARE.search(text)
    if found is None or is_warning(text) or says(text, "less", "went-on", "of-launcher"):
        return None
    whole = [found["message"] or found["quoted"] or ""]
    for line in lines[at + 1 : at + WRAPPED_LINES]:
        after = split_prefix(line.text)[2]
        is_next = (text.rstrip().endswith(":") or says(text, "unfinished")) and len(whole) == 1
        is_next = is_next and not (is_warning(after) or says(after, "less", "traceback", "frame"))
        if not is_next and (len(text) < WRAPPED_FROM or not says(after, "wrapped")):
            break
        text = after
        whole.append(after.strip())
    message = " ".join(filter(None, whole))
    raised = Raised(found["type"] or found["alone"], message, None, says(message, "transport"), at, at)
    return Chain((raised,), rank=rank, kind="bare")


class _Parser:
    """Parser of one stream of one process, from the first line on."""

    def __init__(self, group: Sequence[tuple[int, str]]) -> None:
        self._group = group
        self._chains: list[Chain] = []
        self._open: list[Raised] = []
        self._kind = "main"
        self._linked: int | None = None  # the line that announces another traceback
        self._during = False
        self._unended: list[re.Match[str]] = []
        self.torn: list[int] = []
        self._heads = 0  # tracebacks interrupted by another thread's, whose exceptions are still expected

    def chains(self) -> list[Chain]:
        at = 0
        while at < len(self._group):
            text = self._group[at][1]
            found = _TRACEBACK.match(text) if TRACEBACK_HEAD in text else None
            has_frame = found is None and 'File "' in text
            if has_frame and PREFIXED.match(text):
                at = self._take_logged(at)
            elif found is None:
                frame = _FRAME.match(text) if has_frame else None
                if frame is not None and frame.group("name") is not None:
                    self.torn.append(self._group[at][0])
                if not self._take_torn(at):
                    self._receive(at, text)
                at += 1
            else:
                head = self._group[at][0]
                raised, at = self._read(at, indent=len(found["indent"]))
                if raised is not None:
                    self._take(raised)
                else:
                    self.torn.append(head)
        self._close()
        return self._chains

    def _take_logged(self, at: int) -> int:
        """Take a traceback without its head whose lines have a logger's prefix; return the index after it."""
        self.torn.append(self._group[at][0])
        raised, end = self._read(at - 1, indent=0)
        self._close()
        self._chains += [] if raised is None else [Chain((raised,), kind="torn")]
        return max(end, at + 1)

    def _take_torn(self, at: int) -> bool:
        """Take an exception whose traceback lost its head: frames are shortly before it."""
        text = self._group[at][1]
        found = _SURE.match(text)
        if found is None or not found.group("message"):
            return False
        if self._heads and self._was_taken(at):
            self._heads -= 1
            places = self._unended
        else:
            begin = next((one for one in range(at - TORN_LINES, 0, -1) if not self._group[one - 1][1][:1].isspace()), 0)
            places = [*filter(None, map(_FRAME.match, (text for _, text in self._group[begin:at])))]
            if not places or self._was_taken(at):
                return False
        self._close()
        whole = self._with_next(at, text, (found.group("type"), found.group("message")))
        self._chains.append(Chain((self._raised(at, at, whole, places),), kind="torn"))
        return True

    def _was_taken(self, at: int) -> bool:
        """Return whether the lines before belong to a known exception."""
        known = (*self._open, *(one for chain in self._chains for one in chain.raised))
        return any(self._group[at][0] - one.last <= TORN_LINES for one in known)

    def _receive(self, at: int, text: str) -> None:
        """Handle a line between tracebacks, which may link them: both must be there."""
        if _DURING in text or _DIRECT in text:
            self.torn += [] if self._open else [self._group[at][0]]
            self._linked, self._during = self._group[at][0], _DURING in text
        elif text[:1] not in ("E", "-"):
            return  # as nearly all lines, so none of the patterns is tried
        elif says(text, "ignored"):
            self._close()
            self._kind = "ignored"
        elif text.startswith("Exception in thread "):
            self._close()
            self._kind = "thread"

    def _take(self, raised: Raised) -> None:
        if self._linked is not None and self._open:
            self._open.append(replace(raised, during=self._during))
        else:
            kind = self._kind if not self._open else "main"
            self._close()
            self._kind = "thread" if raised.caught_in[0].endswith("/threading.py") else kind
            self._open = [raised]
        self._linked = None

    def _close(self) -> None:
        if self._open:
            self._chains.append(Chain(tuple(self._open), kind=self._kind))
        if self._linked is not None:
            self.torn.append(self._linked)
        self._open, self._linked, self._kind = [], None, "main"

    def _read(self, start: int, *, indent: int) -> tuple[Raised | None, int]:
        """Return the exception of the traceback at `start`, and the index at which to continue."""
        frames: list[re.Match[str]] = []
        statement = ""
        code_from: int | None = None  # where the line begins that is the first code of its frame
        noise, at, after_frame, prefix = 0, start + 1, False, 0
        while at < len(self._group) and noise <= NOISE_LIMIT:
            text = self._group[at][1]
            body = text[indent:] if text[:indent].strip(" \t|+") == "" else text
            if not frames and not prefix and (logged := PREFIXED.match(body)):
                prefix = len(logged["prefix"])  # a logger's, on every line
            if prefix and len(body) >= prefix and not body[:1].isspace():
                body = body[prefix:]
            frame = _FRAME.match(body) or _BOXED_FRAME.match(body)
            if frame is not None:
                if not frames and frame.re is _FRAME:
                    indent += max(0, len(body) - len(body.lstrip()) - FRAME_INDENT)  # all of it is indented
                frames.append(frame)
                after_frame, statement, code_from = True, "", None
            elif body[:1] in (" ", "\t", *_BOX) or not body.strip():
                begins = len(body) - len(body.lstrip())
                is_lost = code_from == begins or (not frames and body.startswith("    "))
                if is_lost and body.strip(" ^~")[:1] not in ("", *_BOX):
                    self.torn.append(self._group[at][0])  # the frame of this line of code is lost
                code_from = None if statement or not body.strip() else begins
                statement = statement or body.strip()
            elif _TRACEBACK.match(text):
                self._heads += 1
                break
            else:
                found = _exception_line(body, after_frame=after_frame)
                carried = says(body, "carrier") and any(_FRAME.match(text) for _, text in self._group[at + 1 : at + 2])
                if found is not None and not carried:
                    self._unended = frames
                    raised = self._raised(start, at, self._with_next(at, body, found), frames)
                    if frames:
                        caught, thrown = ((one["file"], one["name"] or "") for one in (frames[0], frames[-1]))
                        raised = replace(raised, caught_in=caught, raised_in=thrown, statement=statement)
                    is_whole = may_raise(statement, raised.short_type, raised.message)
                    self.torn += [] if is_whole else [self._group[at][0]]  # frames below are lost
                    return raised, at + 1
                self.torn += [self._group[at][0]] if _DURING in text or _DIRECT in text else []  # its end is lost
                noise += 1
            at += 1
        return None, max(start + 1, at if noise <= NOISE_LIMIT else start + 1)

    def _with_next(self, at: int, body: str, found: tuple[str, str]) -> tuple[str, str]:
        """Append the next line to a message that announces it, such as "backend='inductor' raised:", or that begins
        with empty lines."""
        rest = (text for _, text in self._group[at + 1 : at + 4] if text.strip() or found[1].strip())
        after = next(rest, "")
        if body.rstrip().endswith(" raised:") and not _SURE.match(after):
            self.torn.append(self._group[at][0])  # the exception that it announces is lost
        is_open = body.rstrip().endswith(":") or says(body, "unfinished")
        if not is_open or not after.strip() or TRACEBACK_HEAD in after or after[:1] in _BOX:
            return found
        return found[0], f"{found[1].rstrip()} {after.strip()}".lstrip()

    def _raised(self, start: int, end: int, found: tuple[str, str], frames: Sequence[re.Match[str]]) -> Raised:
        of_program = [index for index, frame in enumerate(frames) if not says(frame["file"], "library")]
        own = of_program or [index for index, frame in enumerate(frames) if frame["file"] == "<string>"]  # python -c
        last = frames[own[-1] if own else -1] if frames else None
        where = None if last is None else f"{last['file'].rpartition('/')[2]}:{last['line']}"
        deeper = frames[own[-1] + 1 :] if own else frames
        collective = any(says(frame["file"], "collective") for frame in deeper[-2:]) or says(found[1], "transport")
        lines = (self._group[max(start, 0)][0], self._group[end][0])
        files = tuple(frame["file"] for frame in reversed(frames))
        below = files[: len(deeper)]
        return Raised(found[0], found[1].strip(), where, bool(collective), *lines, below=below, files=files)


def _exception_line(body: str, *, after_frame: bool) -> tuple[str, str] | None:
    found = _SURE.match(body)
    if found is None and after_frame:
        found = _ANY.match(body)
        if found is not None and (found["type"].upper() in alike("levels") or not _is_class_name(found["type"])):
            return None
    return None if found is None else (found["type"], found["message"] or "")


def _is_class_name(name: str) -> bool:
    """Return whether it is written as a class, or is one of the exceptions that are not, such as struct.error."""
    module, _, last = name.rpartition(".")
    is_class = last.lstrip("_")[:1].isupper() and any(letter.islower() for letter in last)
    is_other = last in ("error", "timeout", "gaierror", "herror") or last.endswith("Error")
    return is_class or (bool(module) and is_other)


# ---------------------------------------------------------------- lines that contain a traceback

_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")


def without_colours(lines: Sequence[Line]) -> tuple[Line, ...]:
    return tuple(line._replace(text=_COLOUR.sub("", line.text)) if "\x1b" in line.text else line for line in lines)


_JSON_END = re.compile(r'(?<!\\)(?:\\\\)*"')
_REPR_END = re.compile(r"(?:\\n)*['\"]?[\])},\s]*$")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "", '\\"': '"', "\\'": "'", "\\\\": "\\", "\\/": "/"}
_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}|\\.")


def unfold(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Split lines that contain a complete traceback, as loggers of JSON and representations of strings have it; every
    piece keeps its line's position and time."""
    pieces = ((line, piece) for line in lines for piece in _pieces_of(line.text))
    return tuple(line if piece is line.text else line._replace(text=piece) for line, piece in pieces)


def _pieces_of(text: str) -> tuple[str, ...]:
    """Return the lines that a line contains: itself, or what is before a traceback and the lines of that."""
    if TRACEBACK_HEAD not in text:
        return (text,)
    places = (text.find(f"{TRACEBACK_HEAD}:{end}") for end in ("\\n", "\\r\\n"))
    start = min((place for place in places if place >= 0), default=None)
    if start is None:
        return (text,)
    return (text[:start], *(piece for piece in _plain(text[start:]).split("\n") if piece.strip()))


def _plain(text: str) -> str:
    """Return the original text, up to the end of the string that contains it."""
    is_json = '\\"' in text or 'File "' not in text
    end = (_JSON_END if is_json else _REPR_END).search(text)
    whole = text if end is None else text[: end.end() - 1 if is_json else end.start()]
    return _ESCAPE.sub(
        lambda found: chr(int(found[0][2:], 16)) if len(found[0]) == 6 else _ESCAPES.get(found[0], found[0]), whole
    )
