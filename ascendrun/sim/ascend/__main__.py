"""Simulated Ascend nodes on the command line: `python -m ascendrun.sim.ascend install ROOT --chip 910B3`, `fault`, …

ROOT is the directory of a node's tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import AscendrunError, InvalidInputError, Problem
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import Scenario, load_scenario
from ascendrun.sim.ascend.tool.live import DEVICE_VARIABLE, LOAD_VARIABLE, MEMORY_VARIABLE, ROOT_VARIABLE
from ascendrun.sim.ascend.tool.model import FAMILIES, KINDS
from ascendrun.sim.ascend.tree import install_tree

Verb = Callable[[argparse.Namespace], None]
OF_NODE = ("node", "-")
_TEXT_FLAGS = ("driver", "firmware", "cann", "nnae", "layout")


def main(argv: Sequence[str]) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        verb: Verb = arguments.verb
        verb(arguments)
    except InvalidInputError as error:
        for problem in error.problems:
            print(f"ascend sim: {problem}", file=sys.stderr)
        return error.exit_code
    except (AscendrunError, OSError) as error:
        print(f"ascend sim: {error}", file=sys.stderr)
        if isinstance(error, AscendrunError) and error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return error.exit_code if isinstance(error, AscendrunError) else 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    about = f"{__doc__}\nA process uses a simulated NPU with {DEVICE_VARIABLE}=<device> or =auto in its environment "
    about += f"(also {MEMORY_VARIABLE}, {LOAD_VARIABLE}); for a node in a directory also {ROOT_VARIABLE}=ROOT."
    parser = argparse.ArgumentParser(
        prog="python -m ascendrun.sim.ascend", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    install = _add(verbs, "install", _install, "make a directory a simulated node")
    install.add_argument("root", type=Path)
    add_scenario(install)
    fault = _add(verbs, "fault", _fault, "switch a fault on")
    fault.add_argument("root", type=Path)
    fault.add_argument("card", help="an NPU id, or `node` for a fault of the whole node")
    fault.add_argument("fault", help="see: faults")
    fault.add_argument("--value", help="how much, or which; each fault has a default")
    fault.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="it begins then")
    clear = _add(verbs, "clear", _clear, "undo faults")
    clear.add_argument("root", type=Path)
    clear.add_argument("card", nargs="?", help="an NPU id or `node`; none: all there are")
    clear.add_argument("fault", nargs="?")
    show = _add(verbs, "show", _show, "which faults a node has")
    show.add_argument("root", type=Path)
    _add(verbs, "faults", _list_faults, "every fault there is")
    return parser


def add_scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", type=Path, help="a file of YAML or JSON; the flags below change it")
    parser.add_argument("--chip", choices=sorted(FAMILIES))
    parser.add_argument("--cards", type=int)
    for name in _TEXT_FLAGS:
        parser.add_argument(f"--{name}")


def _add(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, verb: Verb, words: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=words, description=words)
    parser.set_defaults(verb=verb)
    return parser


def _install(arguments: argparse.Namespace) -> None:
    root = arguments.root.resolve()
    install_tree(root, scenario_of(arguments), seen_as=str(root))
    print(f"export PATH={root}/usr/local/bin:$PATH {ROOT_VARIABLE}={root}", file=sys.stderr)


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """The scenario of the flags that `add_scenario` has added."""
    scenario = load_scenario(arguments.scenario) if arguments.scenario else Scenario()
    given = {name: getattr(arguments, name) for name in ("chip", "cards", *_TEXT_FLAGS)}
    return dataclasses.replace(scenario, **{name: value for name, value in given.items() if value is not None})


def _fault(arguments: argparse.Namespace) -> None:
    tree.set_fault(
        arguments.root, _card(arguments.card), arguments.fault, value=arguments.value, after_s=arguments.after
    )


def _clear(arguments: argparse.Namespace) -> None:
    root = arguments.root
    if arguments.card is None:
        tree.clear_all(root)
        return
    card = _card(arguments.card)
    names = [one.name for one in tree.list_faults(root) if one.card == card]
    for name in [arguments.fault] if arguments.fault else names:
        tree.clear_fault(root, card, name)


def _show(arguments: argparse.Namespace) -> None:
    for fault in tree.list_faults(arguments.root):
        card = "node" if fault.card is None else fault.card
        begins = "" if fault.since_s <= time.time() else f"  begins in {fault.since_s - time.time():.1f} s"
        print(f"{card:>5}  {fault.name:18} {fault.value or ''}{begins}")


def _list_faults(arguments: argparse.Namespace) -> None:
    for name, kind in KINDS.items():
        default = "" if kind.default is None else f" ({kind.default})"
        print(f"{kind.of:5} {name:18} {kind.meaning}{default}")


def _card(word: str) -> int | None:
    if word in OF_NODE:
        return None
    if not word.isdigit():
        raise InvalidInputError([Problem("card", None, None, f"{word} is neither an NPU id nor `node`")])
    return int(word)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
