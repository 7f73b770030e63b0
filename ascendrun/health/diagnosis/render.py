"""A diagnosis in words: from texts/en.json, texts/zh.json and the signature catalogue."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from ascendrun.ascend.signatures import scan, signature_of, strongest
from ascendrun.core.logs.log_lines import fold_ranks
from ascendrun.core.names import fold_names
from ascendrun.health.diagnosis.lines.rank_lines import RULED
from ascendrun.health.diagnosis.result import ChainLink, Diagnosis, Proof, Role

LANGUAGES = ("en", "zh")
MESSAGE_CHARACTERS, TAIL_CHARACTERS = 160, 60
_PLACE = re.compile(r"\{([a-z_]+)\}")


@cache
def texts(lang: str) -> Mapping[str, Any]:
    """{"verdicts": {code: {says, why, advice}}, "ends": {code: text}, "doubts", "odd", "labels": {name: text}}."""
    raw = resources.files(__package__ or "").joinpath("texts").joinpath(f"{lang}.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(raw)
    return found


def tell(diagnosis: Diagnosis, lang: str = "en") -> Diagnosis:
    """With `says`, `why`, `advice`, the chain's sentences, and doubts and oddities as sentences."""
    words = texts(lang if lang in LANGUAGES else "en")
    values = {"who": who(diagnosis.ranks, diagnosis.hosts, lang), **diagnosis.values}
    if diagnosis.code != "exception" and len(values.get("message", "")) > MESSAGE_CHARACTERS:
        values["message"] = _shortened(values["message"])
    says, why, advice = _verdict(diagnosis, values, lang)
    return replace(
        diagnosis,
        says=says,
        why=why,
        advice=advice,
        chain=tuple(replace(link, says=_link(link, lang)) for link in diagnosis.chain),
        doubts=tuple(words["doubts"].get(doubt, doubt) for doubt in diagnosis.doubts),
        odd=tuple(_odd(text, words) for text in diagnosis.odd),
        decided=tuple(words["labels"].get(text, text) for text in diagnosis.decided),
        rivals=tuple(replace(rival, says=_short(rival.code, rival.values, lang)) for rival in diagnosis.rivals),
        proofs=tuple(replace(proof, text=_proof(proof, lang)) for proof in diagnosis.proofs),
    )


def _shortened(message: str) -> str:
    """Its beginning and its end, where the reason often stands."""
    return f"{message[: MESSAGE_CHARACTERS - TAIL_CHARACTERS].rstrip()} … {message[-TAIL_CHARACTERS:].lstrip()}"


def who(ranks: tuple[int, ...], hosts: tuple[str, ...], lang: str) -> str:
    """rank 2 on npu01; ranks 8-15 on npu02; npu03."""
    words = texts(lang)["labels"]
    place = fold_names(hosts) if hosts else ""
    if not ranks:
        return place or words["nobody"]
    name = words["rank" if len(ranks) == 1 else "ranks"].replace("{ranks}", fold_ranks(ranks))
    return words["rank_on"].replace("{rank}", name).replace("{host}", place) if place else str(name)


def label(name: str, lang: str) -> str:
    text: str = texts(lang)["labels"].get(name, name)
    return text


def _verdict(diagnosis: Diagnosis, values: Mapping[str, str], lang: str) -> tuple[str, str, str]:
    row = texts(lang)["verdicts"].get(diagnosis.code)
    labels = texts(lang)["labels"]
    if row is not None:
        row = {**row, **_by_kind(diagnosis, lang)}
        return tuple(fill(row.get(part, ""), values) for part in ("says", "why", "advice"))  # type: ignore[return-value]
    signature = signature_of(diagnosis.code)
    if signature is None:
        return fill(labels["failed_first"], {**values, "says": diagnosis.code}), "", ""
    words = signature.words(lang, diagnosis.values)
    says = words.message
    if diagnosis.values.get("message", "") not in ("", words.message) and values["message"] not in words.message:
        says = fill(labels["with_exception"], {**values, "says": words.message})
    is_path = diagnosis.values.get("to", "?") != "?"
    name = "path" if is_path else "points_at" if diagnosis.code in RULED else "failed_first"
    return fill(labels[name], {**values, "says": says}), words.cause, words.hint


def _by_kind(diagnosis: Diagnosis, lang: str) -> Mapping[str, str]:
    """Why and what helps, where the signal, the exit code or the exception's class tells more than the verdict does."""
    words, values = texts(lang), diagnosis.values
    if diagnosis.code == "exception":
        hits = [hit for hit in scan([(0, f"{values.get('type', '')}: ")]) if hit.signature.code.startswith("python-")]
        best = strongest(hits)
        place = words["labels"]["look_at" if values.get("where", "?") != "?" else "look_up"]
        return (
            {"advice": place}
            if best is None
            else {"why": best.signature.words(lang).cause, "advice": f"{place}; {best.signature.words(lang).hint}"}
        )
    kinds: Mapping[str, Mapping[str, str]] = words["exit_codes"] if diagnosis.code == "exit-code" else words["signals"]
    return kinds.get(values.get("code" if diagnosis.code == "exit-code" else "signal", ""), {})


def _short(code: str, values: Mapping[str, str], lang: str) -> str:
    """What a code means, without who."""
    ends: dict[str, str] = texts(lang)["ends"]
    if code in ends:
        return fill(ends[code], values)
    signature = signature_of(code)
    return code if signature is None else signature.words(lang, values).message


def _link(link: ChainLink, lang: str) -> str:
    if link.role is Role.INITIATING:
        return label("first", lang)
    return _short(link.code, link.values, lang)


def _proof(proof: Proof, lang: str) -> str:
    """A line of a file stands as it is; what we say ourselves is said in the language, with its speaker."""
    if proof.file is not None or proof.rank is None:
        return proof.text
    text = proof.text
    for english, told in texts(lang)["phrases"].items():
        text = text.replace(english, told)
    return f"{who((proof.rank,), (proof.host,) if proof.host else (), lang)}: {text}"


def _odd(text: str, words: Mapping[str, Any]) -> str:
    name, *rest = text.split("|")
    template: str = words["odd"].get(name, text)
    for index, value in enumerate(rest):
        template = template.replace("{%d}" % index, value)
    return template


def fill(text: str, values: Mapping[str, str]) -> str:
    """Each {name} by its value; without one, by "?"."""
    return _PLACE.sub(lambda place: values.get(place[1], "?"), text)
