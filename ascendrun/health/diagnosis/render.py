"""Sentences of a diagnosis in one language, from texts/messages.json and the signature catalogue.

The keys of translations: `diagnosis.CODE.message|cause|hint`, `diagnosis.end.CODE`, `diagnosis.caveat.NAME`,
`diagnosis.anomaly.CODE`, `diagnosis.signal.SIGNAL.cause|hint`, `diagnosis.exit-code.N.cause|hint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from ascendrun.ascend.signatures import Description, scan, signature_of, strongest
from ascendrun.health.diagnosis.lines.rank_lines import RULED
from ascendrun.health.diagnosis.result import ChainLink, Confidence, Diagnosis, Proof, Role
from ascendrun.text import Text, language, template_of

MESSAGE_CHARACTERS, TAIL_CHARACTERS = 160, 60
"""Of a message next to the text of its signature; a message without a signature is not shortened."""
FIRST = Text("diagnosis.first", "failed first")
NOT_RESTARTED = Text(
    "diagnosis.not-restarted",
    "not restarted automatically; with `checkpoint.dir` set, the next submission resumes from the latest checkpoint",
)
CONFIDENCE = {
    Confidence.CERTAIN: Text("confidence.certain", "certain"),
    Confidence.LIKELY: Text("confidence.likely", "likely"),
    Confidence.UNKNOWN: Text("confidence.unknown", "unknown"),
}
_PLACE = re.compile(r"\{([a-z_]+)\}")


@cache
def messages() -> Mapping[str, Any]:
    """Return the English: {"messages": {code: {message, cause, hint}}, "ends", "caveats", "signals", "exit_codes"}."""
    raw = resources.files(__package__ or "").joinpath("texts").joinpath("messages.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(raw)
    return found


def render(diagnosis: Diagnosis, lang: str | None = None) -> Diagnosis:
    """Render strings in a language (None: the process's); evidence, caveats, anomalies and outcome stay texts."""
    lang = lang or language()
    plain = {name: _string(value, lang) for name, value in diagnosis.values.items()}
    values = {"who": who(diagnosis.ranks, diagnosis.hosts).render(lang), **plain}
    if diagnosis.code != "exception" and len(values.get("message", "")) > MESSAGE_CHARACTERS:
        values["message"] = _shortened(values["message"])
    sentences = _sentences(diagnosis, values, lang)
    return replace(
        diagnosis,
        values=plain,
        message=sentences.message,
        cause=sentences.cause,
        hint=sentences.hint,
        chain=tuple(replace(link, message=_end_of(link, lang)) for link in diagnosis.chain),
        alternatives=tuple(
            replace(alternative, message=_short(alternative.code, alternative.values, lang))
            for alternative in diagnosis.alternatives
        ),
        evidence=tuple(replace(proof, text=_evidence(proof)) for proof in diagnosis.evidence),
    )


def who(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> Text:
    """Return "rank 2 on npu01", "ranks 8-15 on npu02", or "npu03"."""
    values = {"ranks": list(ranks), "hosts": list(hosts)}
    if not ranks:
        if hosts:
            return Text("diagnosis.who-hosts", "{hosts:hosts}", **values)
        return Text("diagnosis.who-unknown", "an unknown rank")
    if len(ranks) == 1:
        if hosts:
            return Text("diagnosis.who-rank-on", "rank {ranks:ranks} on {hosts:hosts}", **values)
        return Text("diagnosis.who-rank", "rank {ranks:ranks}", **values)
    if hosts:
        return Text("diagnosis.who-ranks-on", "ranks {ranks:ranks} on {hosts:hosts}", **values)
    return Text("diagnosis.who-ranks", "ranks {ranks:ranks}", **values)


def _string(value: str | Text, lang: str) -> str:
    return value.render(lang) if isinstance(value, Text) else value


def _shortened(message: str) -> str:
    """Return the start and the end of a message; the end often has the reason."""
    return f"{message[: MESSAGE_CHARACTERS - TAIL_CHARACTERS].rstrip()} … {message[-TAIL_CHARACTERS:].lstrip()}"


def _sentences(diagnosis: Diagnosis, values: Mapping[str, str], lang: str) -> Description:
    row = messages()["messages"].get(diagnosis.code)
    if row is not None:
        keyed = {
            part: (f"diagnosis.{diagnosis.code}.{part}", row.get(part, "")) for part in ("message", "cause", "hint")
        }
        keyed.update(_by_kind(diagnosis))
        texts = {part: _fill(template_of(key, english, lang), values) for part, (key, english) in keyed.items()}
        if diagnosis.code == "exception":
            texts.update(_of_exception(values, lang))
        return Description(**texts)
    signature = signature_of(diagnosis.code)
    if signature is None:
        return Description(_first_to_fail({**values, "reason": diagnosis.code}).render(lang), "", "")
    known = signature.words(lang, values)
    reason = known.message
    if diagnosis.values.get("message", "") not in ("", known.message) and values["message"] not in known.message:
        reason = Text(
            "diagnosis.with-exception",
            "{reason} ({message}, at {where})",
            reason=reason,
            message=values["message"],
            where=values.get("where", "?"),
        ).render(lang)
    found = {**values, "reason": reason}
    if diagnosis.values.get("to", "?") != "?":
        sentence = Text(
            "diagnosis.path",
            "the evidence points to {who}: {reason} (from {source} to {target}: {why})",
            who=values["who"],
            reason=reason,
            source=values.get("from", "?"),
            target=values["to"],
            why=values.get("reason", "?"),
        )
    elif diagnosis.code in RULED:
        sentence = Text(
            "diagnosis.points-to", "the evidence points to {who}: {reason}", **_only(found, "who", "reason")
        )
    else:
        sentence = _first_to_fail(found)
    return Description(sentence.render(lang), known.cause, known.hint)


def _first_to_fail(values: Mapping[str, str]) -> Text:
    return Text("diagnosis.failed-first", "{who} failed first: {reason}", **_only(values, "who", "reason"))


def _only(values: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: values[name] for name in names}


def _of_exception(values: Mapping[str, str], lang: str) -> Mapping[str, str]:
    """Return cause and hint of an exception: those of its class if the catalogue has it."""
    where = values.get("where", "?")
    place = (
        Text("diagnosis.see-output", "`ascendrun logs JOB --rank R --stream err` shows all its output")
        if where == "?"
        else Text(
            "diagnosis.see-traceback",
            "check {where}; `ascendrun logs JOB --rank R --stream err` shows the whole traceback",
            where=where,
        )
    ).render(lang)
    hits = [hit for hit in scan([(0, f"{values.get('type', '')}: ")]) if hit.signature.code.startswith("python-")]
    best = strongest(hits)
    if best is None:
        return {"hint": place}
    known = best.signature.words(lang)
    return {
        "cause": known.cause,
        "hint": Text("diagnosis.and", "{first}; {second}", first=place, second=known.hint).render(lang),
    }


def _by_kind(diagnosis: Diagnosis) -> Mapping[str, tuple[str, str]]:
    """Return key and English of cause and hint if the signal or exit code is more specific than the code."""
    if diagnosis.code == "exit-code":
        kind, name, rows = "exit-code", diagnosis.values.get("code", ""), messages()["exit_codes"]
    else:
        kind, name, rows = "signal", diagnosis.values.get("signal", ""), messages()["signals"]
    return {part: (f"diagnosis.{kind}.{name}.{part}", english) for part, english in rows.get(name, {}).items()}


def _short(code: str, values: Mapping[str, str | Text], lang: str) -> str:
    """Return the message of a code, without ranks and hosts."""
    plain = {name: _string(value, lang) for name, value in values.items()}
    if code in messages()["ends"]:
        return _fill(template_of(f"diagnosis.end.{code}", messages()["ends"][code], lang), plain)
    signature = signature_of(code)
    return code if signature is None else signature.words(lang, plain).message


def _end_of(link: ChainLink, lang: str) -> str:
    return FIRST.render(lang) if link.role is Role.INITIATING else _short(link.code, link.values, lang)


def caveat(name: str) -> Text:
    """Return a reason for uncertainty by its name in texts/messages.json."""
    return Text(f"diagnosis.caveat.{name}", messages()["caveats"][name])


def _evidence(proof: Proof) -> str | Text:
    """Return a line of a file unchanged; an observation of ascendrun with its rank."""
    if proof.file is not None or proof.rank is None:
        return proof.text
    place = who((proof.rank,), (proof.host,) if proof.host else ())
    return Text("cli.at", "{place}: {message}", place=place, message=proof.text)


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each {name} by its value, or by "?" without one."""
    return _PLACE.sub(lambda place: values.get(place[1], "?"), text)
