"""Replacement of credentials in texts by marks: the same secret gets the same mark."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from re import Match, Pattern
from typing import Callable
from urllib.parse import quote, quote_plus

SHORTEST_KNOWN = 4
"""A shorter value would match ordinary text."""
SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|(?:API|ACCESS|PRIVATE)_?KEY|CREDENTIAL|COOKIE|(?:\b|_)AUTH\b|"
    r"_KEY\Z|\AKEY\Z|._PWD\Z|(?:\b|_)SK\Z",
    re.IGNORECASE,
)
"""Names of variables with secret values."""

MOST_LEARNED = 20_000
_LEARNED_KINDS = frozenset(
    {"named", "argument", "password", "url-login", "url-parameter", "cookie", "authorization", "webhook"}
)
"""Kinds of values without a recognisable form: also searched for without their context."""

_MARK = re.compile(r"\[redacted \d+: [a-z -]+\]|\(secret[^)]*\)")
_WORDS = frozenset({"none", "null", "true", "false", "default", "undefined", "missing", "required", "redacted", "auto"})

Hide = Callable[[str, str], str]
"""(value, kind) -> its replacement."""


def _rule(kind: str, pattern: str, *needles: str, flags: int = 0) -> _Rule:
    return _Rule(kind, re.compile(pattern, flags), needles)


class _Rule:
    """A pattern whose group `s` (or `bare`) is the secret. `needles`: without one of these, in lower case, no match.
    `is_anchored`: every match starts with a needle; searching for those first is 30 times as fast."""

    def __init__(self, kind: str, pattern: Pattern[str], needles: Sequence[str], *, is_anchored: bool = False) -> None:
        self.kind, self.pattern, self.needles, self.is_anchored = kind, pattern, needles, is_anchored

    def apply(self, text: str, low: str, hide: Hide) -> str:
        """Apply the rule. `low`: the text in lower case, of the same length."""
        if not any(needle in low for needle in self.needles):
            return text
        replace = _replacer(self.kind, hide)
        if not self.is_anchored:
            return self.pattern.sub(replace, text)
        pieces, end = [], 0
        for start in sorted({at for needle in self.needles for at in _places(low, needle)}):
            found = self.pattern.match(text, start) if start >= end else None
            if found is not None:
                pieces += [text[end:start], replace(found)]
                end = found.end()
        return "".join([*pieces, text[end:]]) if pieces else text


_QUOTED_OR_BARE = r"""(?:(?P<q>\\*["'])(?P<s>[^\n]{1,4096}?)(?P=q)|(?P<bare>[^\s"'<>\\]{4,4096}))"""
_NAMES = (
    r"token|secret|passw(?:or)?d|passphrase|(?:api|access|private|secret)[_-]?key(?:[_-]?id)?|credentials?|"
    r"cookie|_auth|_pwd|_sk|(?<!machine)_key"
)
_ANCHORS = (
    *("token", "secret", "passw", "passphrase", "apikey", "accesskey", "privatekey", "credential", "cookie"),
    *("api-key", "access-key", "private-key", "_auth", "_pwd", "_sk", "_key"),
)
_SPECIAL_TOKENS = ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "num", "max", "image")
_NOT_TOKENS = "".join(f"(?<!{name}_)" for name in _SPECIAL_TOKENS)

_RULES: tuple[_Rule, ...] = (
    _rule(
        "private-key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?P<s>(?:(?!-----)[\s\S]){1,32768}?)"
        r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY",
        "private key",
    ),
    _rule(
        "private-key",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?P<s>[A-Za-z0-9+/=\s\\,:-]{1,32768})",
        "private key",
    ),
    _rule("private-key", r"(?P<s>[A-Za-z0-9+/=\s\\]{16,32768})-----END [A-Z0-9 ]{0,40}PRIVATE KEY", "private key"),
    _rule(
        "webhook",
        r"(?:/open-apis/bot/(?:v2/)?hook/|hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|"
        r"discord(?:app)?\.com/api/webhooks/|hc-ping\.com/)(?P<s>[A-Za-z0-9_/.-]{6,300})",
        "hook",
        "hc-ping",
    ),
    _rule(
        "authorization",
        r"authorization\\*[\"']?\s{0,3}[:=]\s{0,3}\\*[\"']?"
        r"(?:(?:bearer|basic|digest|token|negotiate)\s+)?(?P<s>[^\s\"'\\,;]{4,8192})",
        "authorization",
        flags=re.I,
    ),
    _rule("authorization", r"\b(?:bearer|basic)\s+(?P<s>[A-Za-z0-9._~+/=-]{12,8192})", "bearer", "basic", flags=re.I),
    _rule("cookie", r"\b(?:set-)?cookie\\*[\"']?\s{0,3}[:=]\s{0,3}(?P<s>[^\r\n\"']{4,8192})", "cookie", flags=re.I),
    _rule(
        "url-login", r"[a-z][a-z0-9+.-]{1,20}://(?P<s>[^\s/@\"'<>:]{0,256}:[^\s/@\"'<>]{1,1024})@", "://", flags=re.I
    ),
    _rule("url-login", r"https?://(?P<s>[^\s/@\"'<>:]{8,1024})@", "://", flags=re.I),
    _rule(
        "url-parameter",
        r"[?&](?:access_token|token|key|api_?key|sign|sig|signature|secret|password|passwd|auth|"
        r"code|x-amz-(?:signature|credential|security-token)|x-goog-signature|ossaccesskeyid)="
        r"(?P<s>[^\s&\"'<>#\\]{4,4096})",
        "=",
        flags=re.I,
    ),
    _rule("aws-key", r"\b(?P<s>(?:AKIA|ASIA|AROA)[0-9A-Z]{16})\b", "akia", "asia", "aroa"),
    _rule("hugging-face-token", r"\b(?P<s>(?:hf|api_org)_[A-Za-z0-9]{16,200})", "hf_", "api_org_"),
    _rule("github-token", r"\b(?P<s>(?:gh[pousr]_[A-Za-z0-9]{16,255}|github_pat_[A-Za-z0-9_]{20,255}))", "gh"),
    _rule("gitlab-token", r"\b(?P<s>gl(?:pat|dt|rt|cbt|ptt|agent)-[A-Za-z0-9_.-]{16,255})", "gl"),
    _rule("slack-token", r"\b(?P<s>xox[abeoprs]-[A-Za-z0-9-]{10,255})", "xox"),
    _rule("model-api-key", r"\b(?P<s>sk-[A-Za-z0-9_-]{16,255})", "sk-"),
    _rule("google-key", r"\b(?P<s>AIza[0-9A-Za-z_-]{30,60})", "aiza"),
    _rule("aliyun-key", r"\b(?P<s>LTAI[0-9A-Za-z]{12,30})\b", "ltai"),
    _rule("package-index-token", r"\b(?P<s>(?:npm_[A-Za-z0-9]{30,60}|pypi-[A-Za-z0-9_-]{40,400}))", "npm_", "pypi-"),
    _rule("dingtalk-secret", r"\b(?P<s>SEC[0-9a-f]{48,80})\b", "sec"),
    _rule("web-token", r"\b(?P<s>eyJ[A-Za-z0-9_-]{8,4096}\.eyJ[A-Za-z0-9_-]{4,8192}\.[A-Za-z0-9_-]{0,2048})", "eyj"),
    _rule("password", r"\bsshpass\b[^\n]{0,20}?-p\s*(?P<s>\S{1,512})", "sshpass"),
    _rule(
        "argument",
        rf"--?[a-z0-9-]{{0,40}}(?:token|passw(?:or)?d|passphrase|secret|api-?key|access-?key)"
        rf"(?:\\*[\"'])?(?:=|\s*,\s*|\s+)(?!-){_QUOTED_OR_BARE}",
        "-",
        flags=re.I,
    ),
    _Rule(
        "named",
        re.compile(
            rf"{_NOT_TOKENS}(?:{_NAMES})(?:_[a-z0-9]{{1,20}})?\\*[\"']?\]?\s{{0,3}}(?:=>|[=:])"
            rf"\s{{0,3}}{_QUOTED_OR_BARE}",
            re.I,
        ),
        _ANCHORS,
        is_anchored=True,
    ),
)
_DENSE = re.compile(r"(?<![A-Za-z0-9+=_/.\\-])[A-Za-z0-9+_=-]{32,512}(?![A-Za-z0-9+=_/.\\-])")


class Redactor:
    """Removes credentials from texts. `known`: secret values and the kind for their marks.

    A value found with a name is then also found without it. To find it in earlier texts too, `scan` all texts before
    `redact`. Marks are numbered in the order of their first use, so that the same texts in the same order give the same
    result.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self._known: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._roots: dict[str, str] = {}
        self._finder: Pattern[str] | None = None
        self.count = 0
        for value, kind in (known or {}).items():
            self.learn(value, kind)

    @property
    def secrets(self) -> int:
        """Number of different secrets with a mark."""
        return len(self._numbers)

    def learn(self, value: str, kind: str) -> None:
        """Redact the value and its usual encodings from now on."""
        if len(value) < SHORTEST_KNOWN:
            return
        for variant in _variants(value):
            if variant not in self._known:
                self._known[variant] = kind
                self._roots[variant] = _latin(value)
                self._finder = None

    def scan(self, data: bytes) -> None:
        """Learn the secrets of a text."""
        found: list[tuple[str, str]] = []

        def note(value: str, kind: str) -> str:
            if kind in _LEARNED_KINDS and _is_telling(value):
                found.append((value, kind))
            return value

        _apply_rules(data.decode("latin-1"), note)
        for value, kind in found[: max(0, MOST_LEARNED - len(self._known))]:
            self.learn(value.encode("latin-1").decode("utf-8", "surrogateescape"), kind)

    def redact(self, data: bytes) -> bytes:
        """Return the text with marks instead of secrets, other bytes unchanged. `count`: number of marks."""
        return self._redact(data.decode("latin-1")).encode("latin-1")

    def redact_text(self, text: str) -> str:
        return self.redact(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def _redact(self, text: str) -> str:
        text = self._hide_known(text)
        return self._hide_known(_apply_rules(text, self._mark))

    def _hide_known(self, text: str) -> str:
        if not self._known:
            return text
        if self._finder is None:
            self._finder = _compile_finder(self._known)
        return self._finder.sub(lambda found: self._mark(found.group(), self._known[found.group()]), text)

    def _mark(self, value: str, kind: str) -> str:
        self.count += 1
        number = self._numbers.setdefault(self._roots.get(value, value), len(self._numbers) + 1)
        return f"[redacted {number}: {kind}]"


def redact_text(text: str) -> str:
    """Return a short text without credentials of a known form."""
    return Redactor().redact_text(text)


def hide_values(text: str, values: Sequence[str | None]) -> str:
    """Return `text` without these values and credentials of a known form: for error messages."""
    return Redactor({value: "credential" for value in values if value}).redact_text(text)


def redact_tree(value: object, redactor: Redactor) -> object:
    """Return JSON values with every secret redacted; values of SECRET_NAME are always redacted."""
    if isinstance(value, str):
        return redactor.redact_text(value)
    if isinstance(value, Mapping):
        return {
            redactor.redact_text(str(name)): _redact_named(str(name), entry, redactor) for name, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_tree(entry, redactor) for entry in value]
    return value


def secrets_in_tree(value: object) -> dict[str, str]:
    """Return values of SECRET_NAME anywhere in JSON values, with the kind for the mark."""
    found: dict[str, str] = {}
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if isinstance(entry, str) and SECRET_NAME.search(str(name)):
                found[entry] = "named"
            found.update(secrets_in_tree(entry))
    elif isinstance(value, (list, tuple)):
        for entry in value:
            found.update(secrets_in_tree(entry))
    return found


def _redact_named(name: str, entry: object, redactor: Redactor) -> object:
    if isinstance(entry, str) and entry and SECRET_NAME.search(name) and not _MARK.fullmatch(entry):
        hidden = redactor.redact_text(entry)
        return hidden if hidden != entry else redactor._mark(_latin(entry), "named")
    return redact_tree(entry, redactor)


def _apply_rules(text: str, hide: Hide) -> str:
    low = text.lower()  # positions stay the same: Latin-1
    for rule in _RULES:
        changed = rule.apply(text, low, hide)
        if changed is not text:
            text, low = changed, changed.lower()
    return _DENSE.sub(lambda found: hide(found.group(), "dense") if _is_dense(found.group()) else found.group(), text)


def _places(text: str, needle: str) -> Iterator[int]:
    at = text.find(needle)
    while at >= 0:
        yield at
        at = text.find(needle, at + 1)


def _replacer(kind: str, hide: Hide) -> Callable[[Match[str]], str]:
    def replace(found: Match[str]) -> str:
        group = "s" if found.group("s") is not None else "bare"
        value = found.group(group)
        if _is_plain(value):
            return found.group()
        start, end = found.start(group) - found.start(), found.end(group) - found.start()
        whole = found.group()
        return whole[:start] + hide(value, kind) + whole[end:]

    return replace


def _is_plain(value: str) -> bool:
    """Return whether it is a number, a keyword for "no value", or a mark."""
    first = re.split("[,;)&]", value, maxsplit=1)[0]
    if _MARK.search(value) or "[redacted" in value or first.lower().strip(".") in _WORDS:
        return True
    try:
        float(first.rstrip("%"))
    except ValueError:
        return not value.strip()
    return True


def _is_telling(value: str) -> bool:
    """Return whether it is specific enough to search for everywhere, unlike an ordinary term."""
    kinds = sum(bool(re.search(pattern, value)) for pattern in ("[a-z]", "[A-Z]", "[0-9]", r"[^A-Za-z0-9\s]"))
    return len(value) >= 8 and kinds >= 2 and "\n" not in value and not _is_plain(value)


def _is_dense(value: str) -> bool:
    """Return whether it looks random: three kinds of characters, high entropy; not a C++ symbol, hash (hex) or
    identifier."""
    if value.startswith("_Z") or value.count("_") > 4 or re.fullmatch("[0-9a-fA-F-]+", value):
        return False
    if not (re.search("[a-z]", value) and re.search("[A-Z]", value) and len(re.findall("[0-9]", value)) >= 3):
        return False
    shares = [value.count(character) / len(value) for character in set(value)]
    return -sum(share * math.log2(share) for share in shares) >= 4.0


def _compile_finder(values: Iterable[str]) -> Pattern[str]:
    try:
        return re.compile(_any_of(sorted(values)))
    except RecursionError:  # hundreds of values, each a prefix of the next
        return re.compile(
            "|".join(re.escape(value) for value in sorted(values, key=lambda value: (-len(value), value)))
        )


def _any_of(values: Sequence[str]) -> str:
    """Return a pattern for the longest of these texts (sorted, none empty). Shared prefixes are matched once: with a
    thousand texts this takes seconds instead of hours."""
    branches = []
    for _, group in groupby(values, key=lambda value: value[0]):
        same = list(group)
        start = os.path.commonprefix(same)
        rest = [value[len(start) :] for value in same if len(value) > len(start)]
        tail = f"(?:{_any_of(rest)})" if rest else ""
        branches.append(re.escape(start) + (f"{tail}?" if len(rest) < len(same) and rest else tail))
    return "|".join(branches)


def _variants(value: str) -> set[str]:
    """Return the value as plain text, in JSON, in a URL and in base64, as Latin-1 texts of its bytes."""
    raw = value.encode("utf-8", "surrogateescape")
    safe = raw.decode("utf-8", "replace")
    texts = {value, json.dumps(safe)[1:-1], json.dumps(safe, ensure_ascii=False)[1:-1], repr(safe)[1:-1]}
    found = {_latin(text) for text in texts} | {quote(raw), quote(raw, safe=""), quote_plus(raw)}
    if len(raw) >= 8:
        found |= {base64.b64encode(raw).decode().rstrip("="), base64.urlsafe_b64encode(raw).decode().rstrip("=")}
    return {text for text in found if len(text) >= SHORTEST_KNOWN}


def _latin(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("latin-1")
