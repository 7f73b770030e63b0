"""Rules about a base model as the nodes have it: configuration, tokenizer and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.text import Text


def model_problems(training: Training, option: str, path: str, *, needs_tokenizer: bool) -> Iterator[PlanProblem]:
    """Report a base model that cannot be loaded: configuration, tokenizer, weights; or differs between the hosts."""

    def fatal(code: str, host: str, message: Text, hint: Text) -> PlanProblem:
        return PlanProblem(code, message, hint, option, (host,))

    copy_again = Text("plan.copy-base", "copy the base again; compare the sizes of its files with the source")
    configs = []
    for host, raw in training.found(path).items():
        if "kind" not in raw:
            continue
        at = {"option": option, "path": path}
        names = raw.get("names", ())
        if "adapter_config.json" in names and raw.get("config") is None:
            message = Text("plan.is-adapter", "args.{option}: {path} is a LoRA adapter, not a base model", **at)
            hint = Text("plan.merge-first", "set it to the adapter's base, or to a model merged with save_merged_model")
            yield fatal("is-adapter", host, message, hint)
            continue
        if raw["kind"] != "model" or (raw.get("config") is None and not raw.get("config_error")):
            message = Text("plan.no-config", "args.{option}: {path} has no config.json", **at)
            hint = Text("plan.base-folder", "set a directory with config.json, tokenizer and *.safetensors")
            yield fatal("no-config", host, message, hint)
            continue
        if raw.get("config_error") or not isinstance(raw.get("config"), Mapping):
            reason = raw.get("config_error") or "not an object"
            message = Text("plan.bad-config", "args.{option}: {path}/config.json: {reason}", reason=reason, **at)
            yield fatal("bad-config", host, message, copy_again)
            continue
        configs.append((host, raw))
        if needs_tokenizer and not raw["tokenizer"]["found"]:
            message = Text("plan.no-tokenizer", "args.{option}: {path} has no tokenizer (tokenizer.json)", **at)
            yield fatal("no-tokenizer", host, message, copy_again)
        elif needs_tokenizer and raw["tokenizer"].get("error"):
            reason = raw["tokenizer"]["error"]
            message = Text("plan.bad-tokenizer", "args.{option}: {path}/tokenizer.json: {reason}", reason=reason, **at)
            yield fatal("bad-tokenizer", host, message, copy_again)
        elif needs_tokenizer and (problem := tokenizer_rows(path, raw["tokenizer"].get("ids"), raw["config"])):
            yield replace(problem, option=option, hosts=(host,))
        for code, message, fix in _weight_problems(raw, at, copy_again):
            yield fatal(code, host, message, fix)
    kinds = {host: (raw["config"], raw["tensors"]) for host, raw in configs}
    first = next(iter(kinds.values()), None)
    others = tuple(host for host, kind in kinds.items() if kind != first)
    if others and not any(raw["not_on_disk"] for _, raw in configs):
        message = Text(
            "plan.base-differs", "args.{option}: {path} differs from that of the first host", option=option, path=path
        )
        yield PlanProblem("base-differs", message, copy_again, option, others)


def tokenizer_rows(path: str, ids: int | None, config: Mapping[str, Any]) -> PlanProblem | None:
    """Return the problem of a tokenizer with more numbers of tokens than the model has rows; None: it fits."""
    rows = config.get("vocab_size")
    if ids is None or not isinstance(rows, int) or ids <= rows:
        return None
    message = Text(
        "plan.tokenizer-rows",
        "{path}: the tokenizer numbers its tokens up to {last}; the model has {rows} rows of embeddings",
        path=path,
        last=ids - 1,
        rows=rows,
    )
    hint = Text("plan.resize", "copy the tokenizer of this model, or enlarge it with resize_token_embeddings")
    return PlanProblem("tokenizer-rows", message, hint)


def _weight_problems(raw: Raw, at: Mapping[str, str], hint: Text) -> Iterator[tuple[str, Text, Text]]:
    """Yield (code, message, hint) of the weights of a model on a host. `hint`: for all that a copy repairs."""
    files = raw["files"]

    def invalid(file: str, reason: str) -> Text:
        return Text("plan.bad-file", "args.{option}: invalid {path}/{file}: {reason}", file=file, reason=reason, **at)

    if raw.get("index_error"):
        yield "bad-index", invalid("model.safetensors.index.json", raw["index_error"]), hint
    elif raw["not_on_disk"]:
        message = Text(
            "plan.missing-shards",
            "args.{option}: {path} lacks {missing} of {all} weight files: {files}",
            missing=len(raw["not_on_disk"]),
            all=len(raw["not_on_disk"]) + len(files),
            files=raw["not_on_disk"][:3],
            **at,
        )
        yield "missing-shards", message, hint
    elif not files:
        older = [name for name in raw["names"] if name.endswith((".bin", ".pt", ".pth"))]
        message = Text("plan.no-weights", "args.{option}: {path} has no *.safetensors", **at)
        convert = Text("plan.convert", "convert {files} with save_pretrained of transformers", files=older[:3])
        yield "no-weights", message, convert if older else hint
    for name, one in files.items():
        if "error" in one and not one.get("late"):
            yield "bad-weights", invalid(name, one["error"]), hint
        elif "expected" in one and one["bytes"] != one["expected"]:
            message = Text(
                "plan.truncated",
                "args.{option}: {path}/{file} has {found:bytes}; expected {expected:bytes} by its header",
                file=name,
                found=one["bytes"],
                expected=one["expected"],
                **at,
            )
            yield "truncated", message, hint
    if raw.get("not_in_files"):
        message = Text(
            "plan.missing-weights",
            "args.{option}: {path}: the weights {names} of the index are in no file",
            names=list(raw["not_in_files"]),
            **at,
        )
        yield "missing-weights", message, hint
