"""Conversations to train on and questions with known answers: from JSON lines of several kinds, or generated.

messages    a conversation a line: a list of messages, or an object with the list under `messages`
choices     {"question", "choices": [texts] or {"text", "label"}, "answer" or "answerKey": a letter or a number}
gsm8k       {"question", "answer"}: the answer has calculations <<2+3=5>> and ends with #### 5
code        {"prompt", "test", "entry_point"} as in HumanEval, with "canonical_solution" to train on
spelling    generated: the letters of a word, or how often it has a letter
sums        generated: sums of two one-digit numbers
"""

from __future__ import annotations

import bisect
import json
import random
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Callable

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import sandbox
from ascendrun.programs.nanochat.conversations import Messages, checked
from ascendrun.text import listed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GENERATED_ROWS = 1000
"""Rows of a generated task that does not say how many."""
CALCULATION = re.compile(r"<<([^>]*)>>")
FINAL = re.compile(r"#### (-?[0-9.,]+)")
"""Where a worked solution has its answer, as the authors of GSM8K and nanochat (tasks/gsm8k.py, commit 92d63d4) read
it: scores are compared with theirs."""
FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Example:
    """A conversation, the last message of which is the right reply. `letters`: of a choice, None for other kinds.
    `answer`: what a reply is compared with, None: it cannot be."""

    messages: Messages
    letters: tuple[str, ...] | None
    answer: str | None
    kind: str

    def reward(self, text: str) -> float:
        """Return 1.0 if the answer in a generated reply is right, else 0.0. Code is run in the sandbox; raises
        NoSandboxError."""
        if self.kind == "code":
            return float(sandbox.run(self.program_of(text)).passed)
        found = worked_answer(text)
        if found is None and self.kind != "gsm8k":
            found = text.strip().rstrip(".")
        return float(self.answer is not None and found == self.answer)

    def program_of(self, text: str) -> str:
        """Return the code of a reply, after the imports of the question and before its test."""
        found = FENCED.search(text)
        imports = [line for line in self.messages[0]["content"].splitlines() if line.startswith(("import ", "from "))]
        return "\n".join([*imports, found[1] if found else text, str(self.answer)])


def worked_answer(text: str) -> str | None:
    """Return the number after ####, as it is written but for commas."""
    found = FINAL.search(text)
    return found[1].replace(",", "") if found else None


class Examples(Sequence[Example]):
    """Examples of one task, made when they are read; slices are not read. `starts`: first byte of each line of the
    file, or the numbers of generated ones. `numbers`: of these examples, counted on over the epochs."""

    def __init__(self, path: str, kind: str, starts: Sequence[int], seed: int, numbers: range) -> None:
        self.path, self.kind, self.starts, self.seed, self.numbers = path, kind, starts, seed, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Examples(self.path, self.kind, self.starts, self.seed, self.numbers[place])
        start = self.starts[self.numbers[place] % len(self.starts)]
        if self.kind in GENERATORS:
            return GENERATORS[self.kind](random.Random(f"{self.kind} {self.seed} {start}"))
        with open(self.path, "rb") as file:
            file.seek(start)
            try:
                return READERS[self.kind](json.loads(file.readline()))
            except InvalidDataError as error:
                problem = error.args[0]
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                problem = listed("program.task-line", kind=self.kind, error=repr(error))
            file.seek(0)
            place = listed("program.line", number=file.read(start).count(b"\n") + 1)
        raise InvalidDataError(listed("program.at", path=self.path, place=place, error=problem))


class Joined(Sequence[Example]):
    """Examples of several tasks, one after the other; slices are not read."""

    def __init__(self, tasks: Sequence[Sequence[Example]]) -> None:
        self.tasks, self.starts = tasks, [0, *accumulate(map(len, tasks))]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            first, last, _ = place.indices(len(self))
            spans = [(max(0, first - start), max(0, last - start)) for start in self.starts]
            return Joined([task[start:end] for task, (start, end) in zip(self.tasks, spans)])
        at = bisect.bisect_right(self.starts, place) - 1
        return self.tasks[at][place - self.starts[at]]


def read_task(spec: Mapping[str, Any], seed: int) -> Sequence[Example]:
    """Open a task {file, kind, epochs, rows}. `rows`: the first ones only, 0 or missing: all. `seed`: of generated
    ones. A line is read when its example is asked for, which raises InvalidDataError with its number.

    Raises InvalidDataError.
    """
    kind, rows, epochs = spec.get("kind"), spec.get("rows") or 0, spec.get("epochs") or 1
    path = str(spec.get("file") or "")
    starts: Sequence[int] = range(rows or GENERATED_ROWS) if kind in GENERATORS else starts_of(path)
    if not starts:
        raise InvalidDataError(listed("program.no-samples", path=path))
    starts = starts[: rows or None]
    return Examples(path, str(kind), starts, seed, range(len(starts) * epochs))


def starts_of(path: str) -> Sequence[int]:
    """Return the first byte of each line that is not empty."""
    found, start = array("q"), 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    found.append(start)
                start += len(line)
    except OSError as error:
        raise InvalidDataError(listed("program.task-unreadable", path=path, reason=repr(error))) from error
    return found


# --- kinds of files ---


def from_messages(row: Any) -> Example:
    messages = checked(row["messages"] if isinstance(row, Mapping) else row)
    if len(messages) < 2:
        raise InvalidDataError(listed("program.no-reply"))
    return Example(messages, None, None, "messages")


def from_choices(row: Any) -> Example:
    choices, answer = row["choices"], row.get("answer", row.get("answerKey"))
    texts = choices["text"] if isinstance(choices, Mapping) else choices
    letters = tuple(choices["label"] if isinstance(choices, Mapping) else LETTERS[: len(texts)])
    if isinstance(answer, int) and 0 <= answer < len(letters):
        answer = letters[answer]
    if answer not in letters or len(letters) != len(texts):
        raise InvalidDataError(
            listed("program.task-answer", answer=str(answer),
            letters=list(letters)
        ))  # fmt: skip
    # The letter comes last, without a space, so that it is the same token as the reply. The format is nanochat's
    # (render_mc of tasks/common.py, commit 92d63d4): scores depend on it.
    lines = [f"- {text}={letter}" for letter, text in zip(letters, texts)]
    first, last = f"Multiple Choice question: {row['question']}", "Respond only with the letter of the correct answer."
    question = "\n".join([first, *lines, "", last])
    return Example(exchange(question, answer), letters, answer, "choices")


def from_gsm8k(row: Any) -> Example:
    parts: list[dict[str, str]] = []
    for place, piece in enumerate(CALCULATION.split(row["answer"])):
        if place % 2:
            sum_, _, result = piece.rpartition("=") if "=" in piece else (piece, "", "")
            parts += [{"type": "python", "text": sum_}, {"type": "python_output", "text": result}]
        elif piece:
            parts.append({"type": "text", "text": piece})
    answer = worked_answer(row["answer"])
    if answer is None:
        raise InvalidDataError(listed("program.task-no-answer"))
    return Example(exchange(row["question"], parts), None, answer, "gsm8k")


def from_code(row: Any) -> Example:
    reply = f"{row['prompt']}{row.get('canonical_solution', '')}"
    test = f"{row['test']}\ncheck({row['entry_point']})"
    return Example(exchange(str(row["prompt"]), reply), None, test, "code")


READERS: Mapping[str, Callable[[Any], Example]] = {
    "messages": from_messages,
    "choices": from_choices,
    "gsm8k": from_gsm8k,
    "code": from_code,
}


def exchange(question: str, reply: Any) -> Messages:
    return checked([{"role": "user", "content": question}, {"role": "assistant", "content": reply}])


# --- generated ---

SOUNDS = ("b", "c", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "st", "tr", "ch")
ENDS = ("a", "e", "i", "o", "u", "an", "el", "er", "in", "ot")


def make_spelling(chance: random.Random) -> Example:
    word = "".join(chance.choice(SOUNDS) + chance.choice(ENDS) for _ in range(chance.randint(2, 3)))
    spelled = " ".join(word)
    if chance.random() < 0.5:
        return Example(exchange(f"How is {word} spelled?", spelled), None, spelled, "spelling")
    letter = chance.choice(word)
    answer = str(word.count(letter))
    parts = [
        {"type": "python", "text": f"'{word}'.count('{letter}')"},
        {"type": "python_output", "text": answer},
        {"type": "text", "text": f"#### {answer}"},
    ]
    question = f"How many times does the letter {letter} occur in {word}?"
    return Example(exchange(question, parts), None, answer, "spelling")


def make_sum(chance: random.Random) -> Example:
    first, second = chance.randint(0, 9), chance.randint(0, 9)
    answer = str(first + second)
    return Example(exchange(f"What is {first} + {second}?", answer), None, answer, "sums")


GENERATORS: Mapping[str, Callable[[random.Random], Example]] = {"spelling": make_spelling, "sums": make_sum}
