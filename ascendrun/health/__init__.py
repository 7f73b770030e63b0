"""Evaluation of nodes and jobs, without side effects: probe results become facts, facts become findings.

To add a check:

1. Probe: a row in `survey/probes.py` (or `npu_probes.py`) with the survey item that the node executes
   (node/agent/survey.py) and a parser of its raw result; None means unknown. A slow probe is `is_full`.
2. Fact: a field of `NodeFacts` (`survey/facts.py`, `npu_facts.py`), None by default, and the line that sets it by the
   probe's name.
3. Check: a function `(context) -> Iterator[Finding]` in a module of `checks/` and its row in `CHECKS` of that module.
   A check yields no finding for a fact that is None.
4. Text: message, hint and fix of each code in `ascendrun/text/en.json` (`finding.CODE.message`), the Chinese in
   `zh.json`. Then run `python -m tests.lib.pages`.
"""
