"""Sentences of a diagnosis in one language, from text/en.json and the signature catalogue.

The keys of translations: `diagnosis.CODE.message|cause|hint`, `diagnosis.end.CODE`, `diagnosis.caveat.NAME`,
`diagnosis.anomaly.CODE`, `diagnosis.signal.SIGNAL.cause|hint`, `diagnosis.exit-code.N.cause|hint`,
`diagnosis.CODE.mute|cut.message|cause`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascendrun.ascend.signatures import Description, scan, signature_of, strongest
from ascendrun.ascend.vocabularies import alike, is_of_several, is_open, says, value_of
from ascendrun.health import hints as steps
from ascendrun.health.diagnosis.result import Diagnosis, Proof, Role
from ascendrun.text import Rendered, Text, fill, language, listed, quoted, translations
from ascendrun.text.format import excerpt, label_ranks

MESSAGE_CHARACTERS, TAIL_CHARACTERS, DETAIL_CHARACTERS = 300, 120, 240
"""Of a message next to the text of its signature; a message without a signature is not shortened."""
FIRST = listed("diagnosis.first")
NOT_RESTARTED = listed("diagnosis.not-restarted")


def render(diagnosis: Diagnosis, lang: str | None = None) -> Diagnosis:
    """Render strings in a language (None: the process's); evidence, caveats, anomalies and outcome stay texts."""
    lang = lang or language()
    plain = quoted(diagnosis.values, lang)
    values = {"who": who(diagnosis.ranks, diagnosis.hosts, diagnosis.labels).render(lang), **plain}
    if diagnosis.code != "exception" and "message" in values:  # its end often has the reason
        values["message"] = excerpt(values["message"], MESSAGE_CHARACTERS, tail=TAIL_CHARACTERS)
    sentences = _sentences(diagnosis, values, lang)
    message = sentences.message
    if "detail" in values:
        detail = excerpt(values["detail"], DETAIL_CHARACTERS)
        message = listed("diagnosis.detail", message=message, detail=detail).render(lang)
    return replace(
        diagnosis,
        values=plain,
        message=message,
        cause=sentences.cause,
        hint=sentences.hint,
        chain=tuple(replace(link, message=_short(link.code, link.values, lang, link.role)) for link in diagnosis.chain),
        alternatives=tuple(
            replace(alternative, message=_short(alternative.code, alternative.values, lang))
            for alternative in diagnosis.alternatives
        ),
        evidence=tuple(replace(proof, text=_evidence(proof, diagnosis.labels)) for proof in diagnosis.evidence),
    )


def who(ranks: tuple[int, ...], hosts: tuple[str, ...], labels: Mapping[int, str] | None = None) -> Text:
    """Return "rank 2 on npu01", "ranks 8-15 on npu02", "rank decode/0 on npu02" by the labels of roles, or "npu03"."""
    named = f"rank{'s' if len(ranks) > 1 else ''}{'-on' if hosts else ''}"
    key = named if ranks else "hosts" if hosts else "unknown"
    shown: object = label_ranks(ranks, labels) if labels else list(ranks)
    return listed(f"diagnosis.who-{key}", ranks=shown, hosts=list(hosts))


def _sentences(diagnosis: Diagnosis, values: Mapping[str, str], lang: str) -> Description:
    fits = {**diagnosis.given, "domain": diagnosis.domain}
    misfit = [*([values["misfit"]] if "misfit" in values else []), *steps.known_of(diagnosis, lang)]
    limit = steps.limit_of(diagnosis, lang)
    told = (name for name in ("advice", "solution") if name in values)
    advice = [listed(f"diagnosis.{name}", **{name: values[name]}).render(lang) for name in told]
    if f"diagnosis.{diagnosis.code}.message" in translations("en"):
        texts = {part: _sentence(diagnosis, part, values, lang) for part in ("message", "cause", "hint")}
        hints, of, value = [texts["hint"]], diagnosis.domain, value_of("conclusions", diagnosis.code)
        doing, waited = (steps.first_text([f"{of}.{values.get(key)}"], lang) for key in ("doing", "waited"))
        if diagnosis.code == "exception":
            if values.get("where") == "?":
                said = {"who": values["who"], "reason": values["message"]}
                texts["message"] = listed("diagnosis.failed-first", **said).render(lang)
            texts["cause"], hints = _of_exception(diagnosis, values, lang, texts["cause"], advice)
        elif is_open(diagnosis.code) and "outside" not in (of, "" if value is None else value.domain):
            peers = steps.first_text(["peers"], lang) if diagnosis.given.get("PEERS") else []
            fixes = [*steps.fixes_of(diagnosis, lang), *steps.suspected_of(diagnosis, lang)]
            hints = [*peers, *advice[: "advice" in values], *fixes, *(limit or waited), *hints]
        hint = steps.fitting([*misfit, *doing, *hints, *(limit or waited)], fits, lang)
        return Description(texts["message"], texts["cause"], hint)
    signature = signature_of(diagnosis.code)
    if signature is None:
        sentence = listed("diagnosis.failed-first", who=values["who"], reason=diagnosis.code)
        return Description(sentence.render(lang), "", "")
    known = signature.words(lang, values)
    if steps.is_of_a_call(diagnosis):
        known = replace(known, message=values.get("message", known.message), cause="")
    found = {"where": "?", "from": "?", "reason": "?", **values}
    reason = known.message
    if diagnosis.values.get("message", "") not in ("", known.message) and values["message"] not in known.message:
        given = {"reason": reason, "message": values["message"], "where": found["where"]}
        name = "with-message" if found["where"] == "?" else "with-exception"
        reason = listed(f"diagnosis.{name}", **given).render(lang)
    given = {"who": values["who"], "reason": reason}
    if diagnosis.values.get("to", "?") != "?":
        path = {"source": found["from"], "target": values["to"], "why": found["reason"]}
        sentence = listed("diagnosis.path", **given, **path)
    else:
        sentence = listed("diagnosis.points-to" if is_of_several(diagnosis.code) else "diagnosis.failed-first", **given)
    fixes = steps.fixes_of(diagnosis, lang, of_domain=False)
    is_vague = is_open(diagnosis.code) or signature.role == "symptom" or bool(steps.served_by(diagnosis))
    hints = [*advice, *fixes, known.hint] if is_vague else [*advice, known.hint, *fixes]
    hints = [*fixes, *advice] if steps.is_owned(diagnosis) else hints
    hints += steps.suspected_of(diagnosis, lang, signature)
    hint = steps.fitting([*misfit, *hints, *limit], fits, lang) or steps.fitting(
        steps.fixes_of(diagnosis, lang), fits, lang
    )
    return Description(sentence.render(lang), known.cause, hint)


def class_text(found: Diagnosis, mark: str = "") -> Text | None:
    """Return domain and scope of a failure, and `mark` behind what was observed of it; None: it has none."""
    if not found.domain:
        return None
    named = {"domain": listed(f"diagnosis.domain.{found.domain}"), "hosts": found.hosts, "group": found.group}
    return listed(f"diagnosis.scope.{found.scope or 'none'}", mark=mark, **named)


def _of_exception(
    diagnosis: Diagnosis, values: Mapping[str, str], lang: str, cause: str, advice: Sequence[str]
) -> tuple[str, list[str]]:
    """Return cause and hints: what the message advises or states, then what helps, or the catalogue's of its class."""
    where, fixes = values.get("where", "?"), steps.fixes_of(diagnosis, lang)
    place = steps.place_of(diagnosis, where, lang)
    hits = [hit for hit in scan([(0, f"{values.get('type', '')}: ")]) if hit.signature.code.startswith("python-")]
    best = strongest(hits)
    known = Description("", "", "") if best is None else best.signature.words(lang)
    domain = listed(f"diagnosis.domain.{diagnosis.domain}").render(lang) if fixes else cause
    names, raised_by = steps.fixes_in(diagnosis), steps.raised_by_of(diagnosis, lang)
    at_line = diagnosis.domain != "data" and (not names or names[0] in alike("at-a-line"))
    said = advice or steps.stated_of(diagnosis, values.get("message", ""), lang)
    advised = [*fixes, *said] if steps.is_owned(diagnosis) else [*said, *fixes]
    ordered = [*said, *raised_by, *fixes] if at_line else [*advised, *raised_by]
    if fixes or said:
        return known.cause or domain, [*ordered, *place]
    elsewhere = steps.first_text(["elsewhere"], lang) if says(values.get("message", ""), "points-elsewhere") else []
    return known.cause or domain, [*elsewhere, *ordered, *place, *steps.of_class(known.hint, values)]


def _sentence(diagnosis: Diagnosis, part: str, values: Mapping[str, str], lang: str) -> str:
    """Return a part: that of the signal or exit code, else of the code, with its output (told), or where that is cut
    off or missing (mute); "" without one."""
    kind, value = ("exit-code", "code") if diagnosis.code in alike("by-exit-code") else ("signal", "signal")
    last, is_cut = diagnosis.values.get("last", ""), diagnosis.given.get("OF", "") in map(str, diagnosis.ranks)
    state = "cut" if is_cut else "mute" if last == "-" else "told" if last else ""
    english, code = translations("en"), diagnosis.code
    for name in (f"{kind}.{diagnosis.values.get(value, '')}", f"{code}.{state}", code):
        key = f"diagnosis.{name}.{part}"
        if key in english:
            return fill(key, english[key], values, lang=lang)
    return ""


def _short(code: str, values: Mapping[str, str | Rendered], lang: str, role: Role = Role.UNKNOWN) -> str:
    """Return the message of a code, without ranks and hosts; that of the first failure is above."""
    if role is Role.INITIATING:
        return FIRST.render(lang)
    plain = quoted(values, lang)
    key = f"diagnosis.end.{code}"
    if key in translations("en"):
        return fill(key, translations("en")[key], plain, lang=lang)
    signature = signature_of(code)
    return code if signature is None else signature.words(lang, plain).message


def caveat(name: str) -> Text:
    """Return a reason for uncertainty by its name."""
    return listed(f"diagnosis.caveat.{name}")


def _evidence(proof: Proof, labels: Mapping[int, str]) -> str | Text:
    """Return a line of a file unchanged; an observation of ascendrun with its rank."""
    if proof.file is not None or proof.rank is None:
        return proof.text
    place = who((proof.rank,), (proof.host,) if proof.host else (), labels)
    return Text("cli.at", "{place}: {message}", place=place, message=proof.text)
