"""HTTP requests for notices in each service's format, and evaluation of the replies.

Sources (read in 2026):
- Feishu and Lark: open.feishu.cn/document/client-docs/bot-v3/add-custom-bot: `msg_type` text or interactive; signature
  in the body, base64(HMAC-SHA256(key = "<seconds>\\n<secret>", message = "")); 100 a minute and 5 a second for one
  robot; a body of at most 20 KB; errors come with status 200 and `code` != 0 (9499 bad request, 19021 signature, 19022
  address, 19024 keyword, 11232 too many).
- DingTalk: open.dingtalk.com/document/robots/custom-robot-access: `msgtype` text or markdown; signature in the URL,
  base64(HMAC-SHA256(key = secret, message = "<milliseconds>\\n<secret>")); 20 a minute, beyond
  that blocked for 10 minutes; errors come with status 200 and `errcode` != 0 (130101 too many, 310000 signature,
  keyword or address).
- WeCom: developer.work.weixin.qq.com/document/path/91770: `msgtype` text (2048 bytes) or markdown (4096 bytes); 20 a
  minute; errors come with status 200 and `errcode` != 0 (45009 too many, 93000 bad key, -1 busy).
- Slack: docs.slack.dev/messaging/sending-messages-using-incoming-webhooks: `text` and `blocks` (header 150 characters,
  section 3000); about one a second; 200 "ok", else a status with a code (400 invalid_payload, 404 no_service), 429
  with Retry-After.
Not tested with the real services: the formats are checked against these pages, field by field.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Callable
from urllib.parse import quote_plus, urlsplit, urlunsplit

from ascendrun.core.dataclass import dataclass
from ascendrun.core.events import Event
from ascendrun.core.notices import SCHEMA_VERSION, TEXT_LIMIT, Notice, Target, Words, describe
from ascendrun.core.records import as_record
from ascendrun.text import Text

REPLY_CHARACTERS = 300


@dataclass(frozen=True)
class Request:
    """One POST (a GET when `body` is None). The URL holds a credential."""

    url: str
    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True)
class DeliveryResult:
    """`outcome`: delivered, retry or refused. `reply`: of the service, or why there is none.
    `wait_s`: the pause that the service requires, None: not given."""

    outcome: str
    reply: Text | str
    wait_s: float | None = None


def make_request(notice: Notice, target: Target, *, url: str, secret: str | None, now_s: float) -> Request:
    """Return the request for the target's service. `url`, `secret`: the target's current values."""
    if target.type == "deadman":
        return Request(append_path(url, target.suffixes.get(notice.kind, "")), {}, None)
    words = describe(notice, target.language)
    headers = {"Content-Type": "application/json; charset=utf-8"}
    if target.type == "generic":
        return _generic(notice, words, target, url, secret, headers, now_s)
    body = _BODIES[target.type](words, target.format)
    if target.type in ("feishu", "lark") and secret:
        stamp = str(int(now_s))
        body = {"timestamp": stamp, "sign": sign_feishu(stamp, secret), **body}
    if target.type == "dingtalk" and secret:
        stamp = str(int(now_s * 1000))
        url = f"{url}&timestamp={stamp}&sign={quote_plus(sign_dingtalk(stamp, secret))}"
    return Request(url, headers, _encode(body))


def sign_feishu(timestamp: str, secret: str) -> str:
    return _base64_hmac(f"{timestamp}\n{secret}", "")


def sign_dingtalk(timestamp: str, secret: str) -> str:
    return _base64_hmac(secret, f"{timestamp}\n{secret}")


def _base64_hmac(key: str, message: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), message.encode(), hashlib.sha256).digest()).decode()


def append_path(url: str, suffix: str) -> str:
    """Return the URL with `suffix` after its path: https://x/ping?a=1 and /fail give https://x/ping/fail?a=1."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/") + suffix if suffix else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _generic(
    notice: Notice, words: Words, target: Target, url: str, secret: str | None, headers: dict[str, str], now_s: float
) -> Request:
    """Make a request in ascendrun's format (schema: docs/notices.md). The signature covers timestamp and body."""
    body = _encode(generic_body(notice, words, target.language))
    headers["Idempotency-Key"] = notice.id
    if secret:
        stamp = str(int(now_s))
        digest = hmac.new(secret.encode(), stamp.encode() + b"\n" + body, hashlib.sha256).hexdigest()
        headers.update({"X-Ascendrun-Timestamp": stamp, "X-Ascendrun-Signature": f"sha256={digest}"})
    return Request(url, headers, body)


def generic_body(notice: Notice, words: Words, lang: str) -> dict[str, Any]:
    """Return the notice as JSON values; also the standard input of a hook."""
    from datetime import datetime, timezone

    from ascendrun.core.logs.redaction import redact_text
    from ascendrun.text.format import fold_hosts

    def utc(at_s: float | None) -> str | None:
        if at_s is None:
            return None
        return datetime.fromtimestamp(at_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    facts = ("state", "attempt", "ranks")
    job = (
        None
        if notice.job is None
        else {
            "id": notice.job,
            "name": notice.name,
            **{name: getattr(notice, name) for name in facts},
            "hosts": list(notice.hosts),
            "nodes": fold_hosts(notice.hosts),
            **{name: utc(getattr(notice, f"{name}_s")) for name in ("created_at", "started_at", "ended_at")},
        }
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "id": notice.id,
        "kind": notice.kind,
        "at": utc(notice.at_s),
        "head": notice.head,
        "lang": lang,
        "title": words.title,
        "text": words.as_text(),
        "reason": redact_text(notice.reason.render(lang)[:TEXT_LIMIT]),
        "event": None if notice.event is None else _event(notice.event),
        "is_bad": words.is_bad,
        "job": job,
    }


def _event(event: Event) -> dict[str, Any]:
    from ascendrun.core.logs.redaction import Redactor, redact_tree

    values = as_record(event.values)
    found = {"code": event.code, "severity": event.severity.value, "attempt": event.attempt, "values": values}
    event_values: Any = redact_tree({**found, "hosts": list(event.hosts), "ranks": list(event.ranks)}, Redactor())
    return dict(event_values)


# ---------------------------------------------------------------- request bodies


def _feishu(words: Words, style: str) -> dict[str, Any]:
    if style == "text":
        return {"msg_type": "text", "content": {"text": cut_bytes(_calm(words.as_text()), 15_000)}}
    lines = "\n".join(f"**{name}**: {_calm_markdown(value)}" for name, value in words.facts)
    title = {"tag": "plain_text", "content": words.title}
    card = {
        "config": {"wide_screen_mode": True},
        "header": {"template": "red" if words.is_bad else "green", "title": title},
        "elements": [{"tag": "div", "text": {"tag": "lark_md", "content": cut_bytes(lines, 15_000)}}],
    }
    return {"msg_type": "interactive", "card": card}


def _dingtalk(words: Words, style: str) -> dict[str, Any]:
    if style == "text":
        return {"msgtype": "text", "text": {"content": cut_bytes(_calm(words.as_text()), 15_000)}}
    lines = "\n".join(f"- **{name}**: {_calm_markdown(value)}" for name, value in words.facts)
    text = f"### {_calm_markdown(words.title)}\n{lines}"
    return {"msgtype": "markdown", "markdown": {"title": words.title, "text": cut_bytes(text, 15_000)}}


def _wecom(words: Words, style: str) -> dict[str, Any]:
    if style == "text":
        return {"msgtype": "text", "text": {"content": cut_bytes(_calm(words.as_text()), 2048)}}
    lines = "\n".join(f"> {name}: {_calm_markdown(value)}" for name, value in words.facts)
    color = "warning" if words.is_bad else "info"
    text = f'<font color="{color}">{_calm_markdown(words.title)}</font>\n{lines}'
    return {"msgtype": "markdown", "markdown": {"content": cut_bytes(text, 4096)}}


def _slack(words: Words, style: str) -> dict[str, Any]:
    body: dict[str, Any] = {"text": _escape_slack(words.as_text())[:3000]}
    if style == "text":
        return body
    lines = "\n".join(f"*{name}*: {_escape_slack(value)}" for name, value in words.facts)
    header = {"type": "header", "text": {"type": "plain_text", "text": words.title[:150]}}
    return {**body, "blocks": [header, {"type": "section", "text": {"type": "mrkdwn", "text": lines[:3000]}}]}


_BODIES: Mapping[str, Callable[[Words, str], dict[str, Any]]] = {
    "feishu": _feishu,
    "lark": _feishu,
    "dingtalk": _dingtalk,
    "wecom": _wecom,
    "slack": _slack,
}


def _calm(text: str) -> str:
    """Remove the bracket of `<at …>` and `<@…>`, so that program output mentions no person."""
    return text.replace("<", "＜")


def _calm_markdown(text: str) -> str:
    """Return free text for the markdown of DingTalk, WeCom and Feishu (no escapes): without tags, links or code."""
    return _calm(text).replace("](", "] (").replace("`", "'").replace("**", "* *")


def _escape_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cut_bytes(text: str, limit: int) -> str:
    """Truncate to at most `limit` bytes of UTF-8, with an ellipsis for the omitted part."""
    raw = text.encode()
    return text if len(raw) <= limit else raw[: limit - 3].decode("utf-8", "ignore") + "…"


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


# ---------------------------------------------------------------- replies of the services

_BUSY: Mapping[str, Mapping[int, float]] = {
    **dict.fromkeys(("feishu", "lark"), {11232: 60.0, 11233: 60.0}),
    "dingtalk": {130101: 600.0, -1: 5.0, 410100: 600.0},
    "wecom": {45009: 60.0, -1: 5.0},
}
"""Codes, sent with status 200, that mean "later", and the delay in seconds."""

_CODE_NAMES = {
    **dict.fromkeys(("feishu", "lark"), ("code", "StatusCode")),
    **dict.fromkeys(("dingtalk", "wecom"), ("errcode",)),
}
_RETRIED_STATUS = frozenset({408, 425, 429})


def read_reply(service: str, status: int, headers: Mapping[str, str], body: bytes) -> DeliveryResult:
    """Evaluate the service's reply. Header names in any case."""
    text = " ".join(body[: 4 * REPLY_CHARACTERS].decode("utf-8", "replace").split())
    text = text if len(text) <= REPLY_CHARACTERS else text[:REPLY_CHARACTERS] + "…"
    reply = f"{status} {text}".strip()
    if status in _RETRIED_STATUS or status >= 500:
        return DeliveryResult("retry", reply, _retry_after(headers))
    if not 200 <= status < 300:
        return DeliveryResult("refused", reply)
    if service not in _CODE_NAMES:
        return DeliveryResult("delivered", reply)
    code = _code_of(body, _CODE_NAMES[service])
    if code is None:
        return DeliveryResult(
            "retry",
            Text(
                "notice.not-a-reply",
                "{reply}: not a reply of {service}; check for a proxy",
                reply=reply,
                service=service,
            ),
        )
    if code == 0:
        return DeliveryResult("delivered", reply)
    wait_s = _BUSY[service].get(code)
    return DeliveryResult("refused", reply) if wait_s is None else DeliveryResult("retry", reply, wait_s)


def _code_of(body: bytes, names: tuple[str, ...]) -> int | None:
    """Return the service's own code; None: not in the reply."""
    try:
        values = json.loads(body)
    except ValueError:
        return None
    found = [values[name] for name in names if name in values] if isinstance(values, dict) else []
    return found[0] if found and isinstance(found[0], int) and not isinstance(found[0], bool) else None


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return seconds; a date in the header is ignored: ascendrun's own schedule applies."""
    for name, value in headers.items():
        if name.lower() == "retry-after" and value.strip().isdigit():
            return float(value.strip()[:9])
    return None
