"""Evaluation of nodes and jobs, without side effects: probe results become facts, facts become findings.

To add a check:

1. Probe: a row in `survey/probes.py` with the survey item that the node executes (node/agent/survey.py), a parser of
   its raw result, None: unknown, and the fact that it sets. A slow probe is `is_full`.
2. Fact: a field of `NodeFacts` or `NpuFacts` (`survey/facts.py`), None by default.
3. Check: a function in a module of `checks/`, decorated as `node_check` (of every node), `npu_check` (of every node
   with NPUs) or `check` (of all together). A check yields no finding for a fact that is None.
4. Text: message, hint and fix of each code in `ascendrun/text/en.json` (`finding.CODE.message`), the Chinese in
   `zh.json`. Then run `python -m tests.lib.pages`.
"""
