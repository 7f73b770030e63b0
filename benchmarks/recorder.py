"""What one real node with eight simulated NPUs reports, recorded once, for the nodes of a simulated fleet.

What varies on a real node varies in the texts of its tools: each sample has one of VARIANTS.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.node.agent.execute import Commands
from ascendrun.node.agent.serve import hello
from ascendrun.node.agent.survey import Surveys
from ascendrun.node.sampler.sample import pack_text, sample_once
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import environ_of, install_tree
from tests.lib.npu_worlds import raw_answers

PATIENCE_S = 60.0
PEERS = ("listen", "tcp")
"""Kinds of survey items that need the other nodes."""
VARIANTS = 400
VARYING = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"(\| OK +\| )([0-9]+\.[0-9] +[0-9]+)",  # power, temperature
        r"(\| 0000:\S+ +\| )([0-9])",  # use of the AI cores
        r"( )([0-9]+)(?= / 65536)",  # HBM in use
        r"^(mac_[rt]x_total_\w+:|roce_[rt]x_(?:rc|all)_\w+:|nic_[rt]x_\w+:)([0-9]+)",
        r"^(\s+(?:Temperature|NPU Real-time Power|HBM Usage Rate|Aicore Usage Rate)\(.{1,2}\) +: )([0-9.]+)",
    )
)


class Recorder:
    """What one real node reports."""

    def __init__(self, folder: Path) -> None:
        install_tree(folder / "node", Scenario(), seen_as=str(folder / "node"))
        os.environ.update(environ_of(folder / "node", dict(os.environ)))
        self._root = str(folder / "root")
        os.makedirs(self._root, 0o700)
        self._surveys = Surveys(self._root, login=dict(os.environb), commands=Commands(dict(os.environb), 0o77))
        self._npu = raw_answers(Scenario())  # type: ignore[no-untyped-call]
        self.hello = hello(self._root, __file__)
        self._path = Path(tempfile.gettempdir()) / "ascendrun-fleet.json"
        self._variants: dict[str, list[list[dict[str, Any]]]] = {}
        self._known: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def _keep(self, key: str, made: Any) -> Any:
        self._known[key] = made
        self._path.write_text(json.dumps(self._known))
        return made

    def survey(self, request: Mapping[str, Any]) -> Any:
        key = json.dumps([item["name"] for item in request["items"]])
        if key not in self._known:
            own = {item["name"]: self._npu.get(item["name"], {}) for item in request["items"]}
            real = [one for one in request["items"] if one["name"] not in self._npu and one["kind"] not in PEERS]
            items = [{**item, "timeout_s": PATIENCE_S} for item in real]
            found = self._surveys.run({**request, "items": items, "timeout_s": PATIENCE_S})["results"]
            self._keep(key, {"results": {**own, **found}})
        return self._known[key]

    def sample(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines of one sample; of each line of a tool one of its variants."""
        key = json.dumps(["sample", *(item["name"] for item in items)])
        if key not in self._known:
            found = sample_once(self._root, items, self._run)["lines"]
            assert not any(line.get("timed_out") for line in found), "the machine is too slow to record a sample"
            self._keep(key, found)
        if key not in self._variants:
            self._variants[key] = [_variants(line) for line in self._known[key]]
        return [random.choice(variants) for variants in self._variants[key]]

    def _run(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        patient = [{**item, "timeout_s": PATIENCE_S} for item in items]
        results: dict[str, Any] = self._surveys.run({"items": patient, "timeout_s": 10 * PATIENCE_S})["results"]
        return results


def _variants(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The line as the sampler of an attempt writes it, with other numbers in each variant."""
    if "text" not in line:
        return [line]
    own = {name: value for name, value in line.items() if name != "text"}
    return [{**own, "wall_s": 0.1, **pack_text(_varied(line["text"]).encode())} for _ in range(VARIANTS)]


def _varied(text: str) -> str:
    def other(found: re.Match[str]) -> str:
        if found[1].endswith("_num:"):
            return f"{found[1]}{random.randrange(10**12)}"
        return found[1] + "".join(random.choice("123456789") if one.isdigit() else one for one in found[2])

    for pattern in VARYING:
        text = pattern.sub(other, text)
    return text
