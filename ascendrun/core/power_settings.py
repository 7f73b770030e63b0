"""The `power` block of settings files: the command that switches hosts off."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal, Optional, Tuple

from pydantic import Field

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import Problem
from ascendrun.core.hosts import Host
from ascendrun.core.reader.model_reader import read_model
from ascendrun.core.reader.strict import Strict, Texts
from ascendrun.core.reader.yaml_source import place_of, texts
from ascendrun.core.settings import POWER_BLOCK, Settings, SettingsBlocks
from ascendrun.text import Text

PLACES = ("bmc", "host", "addr")
PLACE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class PowerAgent:
    """The command that switches a host off or reports its state, of the fence-agents family. PLACES are in braces.
    `file`: that has it."""

    command: tuple[str, ...]
    timeout_s: float
    file: str = ""

    def argv(self, host: Host, action: Literal["off", "status"]) -> list[str]:
        values = {"bmc": host.bmc or "", "host": host.name, "addr": host.addr or host.name}
        return [PLACE.sub(lambda found: values[found[1]], option) for option in (*self.command, f"--action={action}")]


class Power(Texts):
    """The command that switches hosts off."""

    command: Tuple[str, ...] = Field(min_length=1, repr=False, examples=[["fence_redfish", "--ip={bmc}"]])
    timeout_s: Annotated[float, Field(ge=1, le=600)] = 60.0


class Blocks(Strict):
    power: Optional[Power] = Field(None, repr=False, examples=[{"command": ["fence_redfish", "--ip={bmc}"]}])


def read_power(settings: Settings) -> PowerAgent | None:
    """Return the agent of the strongest file that has one; None: no host is switched off. Raises InvalidInputError with
    every problem of every file."""
    return settings.strongest(parse_power)


def parse_power(blocks: SettingsBlocks, problems: list[Problem]) -> PowerAgent | None:
    """Return the agent of one settings file; None when it has none, or problems, which are added to `problems`."""
    node, found = blocks.root.entries.get(POWER_BLOCK), list[Problem]()
    model = None if node is None else read_model(Blocks, {POWER_BLOCK: texts(node)}, blocks.root, blocks.source, found)
    power = None if model is None else model.power
    for index, option in enumerate(() if power is None else power.command):
        for name in set(PLACE.findall(option)) - set(PLACES):
            message = Text("power.place", "unknown placeholder {name:quote}", name=name)
            known = Text("power.places", "known are {places}", places=[f"{{{place}}}" for place in PLACES])
            found.append(place_of(blocks.root, (POWER_BLOCK, "command", index)).problem(message, known))
    problems += [replace(one, is_private=True) for one in found]
    return None if power is None or found else PowerAgent(power.command, power.timeout_s, str(blocks.file))
