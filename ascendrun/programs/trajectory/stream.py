"""Lines in, lines out: {"text"} or {"points"} on standard input, an answer on standard output for each, in order."""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, TextIO

from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trajectory.api import FAULTS_OF_INPUT, Classifier
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.store import Vote
from ascendrun.programs.trajectory.tracks import BadData


def classify_stream(vote: Vote, options: Options, here: Runtime) -> None:
    if here.world_size > 1:
        raise BadData("--data=- reads one standard input, so it takes one rank; give a file to use several devices")
    answer_lines(Classifier.of(vote, here.device), sys.stdin, sys.stdout, with_all=options["probabilities"])
    here.record(done=True)


def answer_lines(classifier: Classifier, lines: TextIO, out: TextIO, *, with_all: bool) -> None:
    """Each at once: who waits for an answer before the next question is not kept waiting."""
    for line in iter(lines.readline, ""):
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
    except FAULTS_OF_INPUT as error:
        return {"error": str(error)}
    return {**({"id": asked["id"]} if "id" in asked else {}), **said}
