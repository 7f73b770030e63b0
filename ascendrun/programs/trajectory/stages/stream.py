"""Line by line replies: {"text"} or {"points"} on standard input, a reply on standard output for each, in order."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Callable, TextIO

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import Vote


def classify_stream(vote: Vote, precision: Precision, options: Options, here: Runtime) -> None:
    if here.world_size > 1:
        raise InvalidDataError(
            "program.stdin-ranks",
            "--data_path=- reads standard input and requires one rank\nhint: use a file for several devices",
        )
    lines = lines_until(lambda: here.stop_requested, sys.stdin.fileno())
    classifier = Classifier.of(vote, here.accelerator, precision)
    answer_lines(classifier, lines, sys.stdout, with_all=options["save_probabilities"])
    here.record(done=True)


def lines_until(is_over: Callable[[], bool], source: int) -> Iterator[bytes]:
    """Yield each line of a file descriptor when it arrives, until its end or a signal after which `is_over`.

    A plain read would not end: Python resumes it after every signal.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    rest = b""
    try:
        while not is_over():
            if source not in select.select([source, woken], [], [])[0]:
                os.read(woken, 1)
                continue
            piece = os.read(source, 2**16)
            *lines, rest = (rest + piece).split(b"\n")
            if not piece and rest:
                lines.append(rest)
            for line in lines:
                if is_over():
                    return
                yield line
            if not piece:
                return
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wakes)


def answer_lines(classifier: Classifier, lines: Iterable[bytes | str], out: TextIO, *, with_all: bool) -> None:
    """Write each reply immediately: a client may wait for it before it sends the next line."""
    for line in lines:
        out.write(json.dumps(answer_line(classifier, line, with_all)) + "\n")
        out.flush()


def answer_line(classifier: Classifier, line: bytes | str, with_all: bool) -> dict[str, Any]:
    """Reply to a line. An invalid line gets {"error"} and does not end the stream."""
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict) or not ({"text", "points"} & set(asked)):
            raise InvalidDataError("program.line-form", 'expected {{"text": "…"}} or {{"points": [{{…}}, …]}}')
        reply = (
            classifier.predict_single(str(asked["text"]), return_probs=with_all)
            if "text" in asked
            else classifier.predict_track(asked["points"], return_probs=with_all)
        )
    except FAULTS_OF_INPUT as error:
        return {"error": str(error)}
    return {**({"id": asked["id"]} if "id" in asked else {}), **reply}
