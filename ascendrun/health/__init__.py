"""Judgements, pure: what nodes say becomes facts, facts become findings.

To add a check, in three steps:

1. Ask. A row in `probes.py` (or `npu_probes.py`): the survey item that the node answers (node/agent/survey.py) and a
   reader that turns its raw answer into a value, None when it could not look. One that takes long is `is_full`.
2. Keep. A field in the part of `NodeFacts` that it belongs to (`facts.py`, `npu_facts.py`), None until read, and one
   line that fills it from the answers by the probe's name.
3. Judge. A function `(world) -> Iterator[Finding]` in a module of `checks/`, a row for it in that module's `CHECKS`,
   and the words of each of its codes in `texts/en.json` and `texts/zh.json`. A fact that is None finds nothing.
"""
