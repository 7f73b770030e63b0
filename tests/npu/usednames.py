"""What our source uses of torch_npu, read from the source: names, and how each is called."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Call = tuple[int, tuple[str, ...]]
"""How many positional arguments, and the names of the others."""
_DEVICE_MODULE = "torch_npu.npu"
_WRITTEN = re.compile(r"\b(torch_npu|torch\.npu)((?:\.[A-Za-z_]\w*)+)(?![\w/])")


def calls_in(sources: Iterable[str]) -> dict[str, set[Call]]:
    """By dotted name of torch_npu; no call: it is only looked at."""
    found: dict[str, set[Call]] = {}
    for source in sources:
        tree = ast.parse(source)
        aliases = dict(aliases_in(tree))
        for node in ast.walk(tree):
            name = resolved(node.func if isinstance(node, ast.Call) else node, aliases)
            if not name.startswith("torch_npu."):
                continue
            calls = found.setdefault(name, set())
            if isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args):
                calls.add((len(node.args), tuple(sorted(word.arg for word in node.keywords if word.arg))))
    return found


def aliases_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of the module that stand for one of torch_npu's: imported so, or given its value."""
    yield from {"torch_npu": "torch_npu", "torch.npu": _DEVICE_MODULE, "accelerator.module": _DEVICE_MODULE}.items()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_npu":
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = resolved(node.value, {"torch_npu": "torch_npu"})
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if value.startswith("torch_npu."):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef) and node.name == "Accelerator":
            yield "self.module", _DEVICE_MODULE


def resolved(node: ast.AST, aliases: Mapping[str, str]) -> str:
    """The dotted name with its longest known beginning put right; "" where it is no name."""
    name = dotted(node)
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        known = aliases.get(".".join(parts[:count]))
        if known:
            return ".".join([known, *parts[count:]])
    return name


def dotted(node: ast.AST) -> str:
    """`getattr(torch, anything)` is read as torch.npu."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and dotted(node.func) == "getattr" and dotted(node.args[0]) == "torch":
        return "torch.npu" if not isinstance(node.args[1], ast.Constant) else ""
    return node.id if isinstance(node, ast.Name) else ""


def written_in(paths: Iterable[Path]) -> list[str]:
    """The names that stand in texts, comments and documents too."""
    found = {match for path in paths for match in _WRITTEN.findall(path.read_text(encoding="utf-8"))}
    return sorted({f"{'torch_npu' if head == 'torch_npu' else _DEVICE_MODULE}{rest}" for head, rest in found})
