"""Rules about a base model as the nodes have it: configuration, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.text import listed


def model_problems(training: Training, path: str, *, needs_tokenizer: bool) -> Iterator[PlanProblem]:
    """Report a `base_model` that cannot be loaded: configuration, tokenizer, weights; or differs between the hosts."""
    copy_again = listed("plan.copy-base")
    configs = []
    for host, raw in training.found(path).items():
        if "kind" not in raw:
            continue
        names, config = raw.get("names", ()), raw.get("config")
        if "adapter_config.json" in names and config is None:
            yield PlanProblem.of("is-adapter", "base_model", (host,), path=path)
            continue
        if raw["kind"] != "model" or (config is None and not raw.get("config_error")):
            yield PlanProblem.of("no-config", "base_model", (host,), path=path)
            continue
        if raw.get("config_error") or not isinstance(config, Mapping):
            reason = raw.get("config_error") or "not an object"
            yield PlanProblem.of("bad-config", "base_model", (host,), hint=copy_again, path=path, reason=reason)
            continue
        configs.append((host, raw))
        if needs_tokenizer and not raw["tokenizer"]["found"]:
            yield PlanProblem.of("no-tokenizer", "base_model", (host,), hint=copy_again, path=path)
        elif needs_tokenizer and raw["tokenizer"].get("error"):
            reason = raw["tokenizer"]["error"]
            yield PlanProblem.of("bad-tokenizer", "base_model", (host,), hint=copy_again, path=path, reason=reason)
        elif needs_tokenizer and (problem := tokenizer_rows(path, raw["tokenizer"].get("ids"), config)):
            yield replace(problem, option="base_model", hosts=(host,))
        for code, values in _weight_problems(raw):
            fix = None if values.get("files") and code == "no-weights" else copy_again
            yield PlanProblem.of(code, "base_model", (host,), hint=fix, path=path, **values)
    kinds = {host: (raw["config"], raw["tensors"]) for host, raw in configs}
    first = next(iter(kinds.values()), None)
    others = tuple(host for host, kind in kinds.items() if kind != first)
    if others and not any(raw["not_on_disk"] for _, raw in configs):
        yield PlanProblem.of("base-differs", "base_model", others, hint=copy_again, path=path)


def tokenizer_rows(path: str, ids: int | None, config: Mapping[str, Any]) -> PlanProblem | None:
    """Return the problem of a tokenizer with more numbers of tokens than the model has rows; None: it fits."""
    rows = config.get("vocab_size")
    if ids is None or not isinstance(rows, int) or ids <= rows:
        return None
    return PlanProblem.of("tokenizer-rows", path=path, last=ids - 1, rows=rows)


def _weight_problems(raw: Raw) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the codes and values of problems of the weights of a model on a host."""
    files = raw["files"]
    if raw.get("index_error"):
        yield "bad-index", {"file": "model.safetensors.index.json", "reason": raw["index_error"]}
    elif raw["not_on_disk"]:
        missing = raw["not_on_disk"]
        yield "missing-shards", {"missing": len(missing), "all": len(missing) + len(files), "files": missing[:3]}
    elif not files:
        yield "no-weights", {"files": [name for name in raw["names"] if name.endswith((".bin", ".pt", ".pth"))][:3]}
    for name, one in files.items():
        if "error" in one and not one.get("late"):
            yield "bad-weights", {"file": name, "reason": one["error"]}
        elif "expected" in one and one["bytes"] != one["expected"]:
            yield "truncated", {"file": name, "found": one["bytes"], "expected": one["expected"]}
    if raw.get("not_in_files"):
        yield "missing-weights", {"names": list(raw["not_in_files"])}
