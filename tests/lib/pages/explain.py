"""docs/explain.md and docs/explain.zh.md: their `text` blocks are what a rank of the case logs, and what `explain`
prints of it. All else is written by hand."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from ascendrun.cli.explanation import explanation_lines
from ascendrun.query.explain import explain_job
from ascendrun.text import language_for_reader

ROOT = Path(__file__).resolve().parents[3]
FAILURES = ROOT / "tests/failures"
CASE, RANK = "one_node_cannot_reach_the_root_of_hccl", 7
CELLS = 120
BLOCK = re.compile(r"^```text\n.*?^```$", re.DOTALL | re.MULTILINE)


def render_page(lang: str = "en") -> str:
    sys.path.insert(0, str(FAILURES))
    corpus, spooling = import_module("corpus"), import_module("spooling")
    case = corpus.load(FAILURES / f"cases/{CASE}.yaml")
    rank = case.evidence.ranks[RANK]
    with TemporaryDirectory() as folder, language_for_reader(lang):
        explanation = explain_job(Path(folder), spooling.spool_case(case, Path(folder)), now_s=case.evidence.now_s)
        printed, _ = explanation_lines(explanation, CELLS, everything=False, why=True)
    logged = ([line.text.rstrip() for line in lines] for lines in (rank.lines, rank.plog or ()))
    blocks = iter([*logged, printed])
    page = (ROOT / "docs" / ("explain.md" if lang == "en" else f"explain.{lang}.md")).read_text(encoding="utf-8")
    return BLOCK.sub(lambda _: "\n".join(["```text", *next(blocks), "```"]), page)
