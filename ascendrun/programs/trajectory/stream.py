"""Lines in, lines out: {"text"} or {"points"} on standard input, an answer on standard output for each, in order."""

from __future__ import annotations

import json
import select
import sys
from typing import Any, Dict, List, TextIO

from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trajectory.api import Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import Vote
from ascendrun.programs.trajectory.tracks import BadData


def classify_stream(vote: Vote, options: Options, here: Runtime) -> None:
    if here.world_size > 1:
        raise BadData("--data=- reads one standard input, so it takes one rank; give a file to use several devices")
    answer_lines(Classifier.of(vote, here.device), sys.stdin, sys.stdout, batch_size=options["batch_size"],
                 with_all=options["probabilities"])
    here.record(done=True)


def answer_lines(classifier: Classifier, lines: TextIO, out: TextIO, *, batch_size: int, with_all: bool) -> None:
    """Takes as many lines as are there, up to a batch: a slow sender gets its answer at once, a fast one batches."""
    waiting: List[str] = []
    for line in iter(lines.readline, ""):
        waiting.append(line)
        if len(waiting) >= batch_size or not has_more(lines):
            flush(classifier, waiting, out, with_all)
            waiting = []
    flush(classifier, waiting, out, with_all)


def has_more(lines: TextIO) -> bool:
    """Whether the next line can be had without waiting; a line that Python has buffered already may be missed, and
    then goes with the next batch."""
    try:
        return bool(select.select([lines], [], [], 0)[0])
    except (OSError, ValueError):
        return False


def flush(classifier: Classifier, lines: List[str], out: TextIO, with_all: bool) -> None:
    for line in lines:
        out.write(json.dumps(answer_line(classifier, line, with_all)) + "\n")
    out.flush()


def answer_line(classifier: Classifier, line: str, with_all: bool) -> Dict[str, Any]:
    """A bad line gets {"error"} and does not end the stream."""
    try:
        asked = json.loads(line)
        if not isinstance(asked, dict) or not ({"text", "points"} & set(asked)):
            raise BadData('must be {"text": "…"} or {"points": [{…}, …]}')
        said = (classifier.predict_single(str(asked["text"]), return_probs=with_all) if "text" in asked
                else classifier.predict_track(asked["points"], return_probs=with_all))
    except (ValueError, TypeError, AttributeError, BadData) as error:
        return {"error": str(error)}
    return {**({"id": asked["id"]} if "id" in asked else {}), **said}
