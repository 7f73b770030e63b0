"""Made-up instructions of three levels with answers that can be checked: for runs without data."""

from __future__ import annotations

import random

from ascendrun.programs.qwen_lora.conversations import Conversation

LEVELS = ("explain", "reasoning", "topology")
NAMES = ("node", "switch", "router", "host", "rack", "port")


def make_conversations(count: int, *, seed: int, system: str) -> list[Conversation]:
    """Two fifths each of the easier levels, a fifth of the hardest."""
    chance = random.Random(seed)
    makers = {"explain": make_fact, "reasoning": make_sum, "topology": make_path}
    found = []
    for i in range(count):
        level = LEVELS[(0, 1, 0, 1, 2)[i % 5]]
        question, answer = makers[level](chance)
        turns = (("user", question), ("assistant", answer))
        found.append(Conversation((("system", system), *turns) if system else turns, level))
    return found


def make_fact(chance: random.Random) -> tuple[str, str]:
    at = chance.randrange(25)
    return f"Which letter comes after {chr(65 + at)}?", chr(66 + at)


def make_sum(chance: random.Random) -> tuple[str, str]:
    first, second, third = (chance.randrange(1, 10) for _ in range(3))
    half = first + second
    return (
        f"A {chance.choice(NAMES)} has {first} cables, gets {second} and then {third} more. How many are there?",
        f"{first} + {second} = {half}\n{half} + {third} = {half + third}\nThe answer is {half + third}.",
    )


def make_path(chance: random.Random) -> tuple[str, str]:
    """A walk along a line of links that are told in any order."""
    nodes = chance.sample("ABCDEFGH", chance.randrange(4, 7))
    links = [f"{one}-{other}" for one, other in zip(nodes, nodes[1:])]
    shown = chance.sample(links, len(links))
    return (
        f"Links: {', '.join(shown)}. Give the path from {nodes[0]} to {nodes[-1]}.",
        f"{' > '.join(nodes)}\nThat is {len(links)} links.",
    )
