"""The bodies that services get, field by field as their documents want them, and what their answers mean."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ascendrun.core.jobs.reasons import because
from ascendrun.core.notices import Notice, Target
from ascendrun.core.notices.formats import append_path, cut_bytes, make_request, read_reply, sign_dingtalk, sign_feishu

NOTICE = Notice(
    id="ab12/j-0007/1/FAILED",
    kind="failed",
    at_s=1599360473.0,
    reason=because("rejected", why="rank 3 on npu2 ended with 1"),
    head="login1",
    job="j-0007",
    name="qwen32b",
    state="FAILED",
    attempt=1,
    hosts=("npu1", "npu2"),
    ranks=16,
    created_at_s=1599360000.0,
    started_at_s=1599360100.0,
    ended_at_s=1599360473.0,
)
EVIL = '<at user_id="all"></at> <@all> <!channel> [free](http://evil) `x` **y** & done'


def ask(
    kind: str,
    *,
    style: str = "rich",
    secret: str | None = None,
    lang: str = "en",
    notice: Notice = NOTICE,
    url: str = "https://x.example/hook?key=k",
) -> Any:
    target = Target(name="t", type=kind, format=style, lang=lang)
    return make_request(notice, target, url=url, secret=secret, now_s=1599360473.7)


def body(kind: str, **options: Any) -> dict[str, Any]:
    request = ask(kind, **options)
    assert request.headers["Content-Type"].startswith("application/json")
    values: dict[str, Any] = json.loads(request.body)
    return values


def test_feishu_gets_a_card() -> None:
    values = body("feishu", lang="zh")
    assert set(values) == {"msg_type", "card"} and values["msg_type"] == "interactive"
    card = values["card"]
    assert card["header"]["title"] == {"tag": "plain_text", "content": "ascendrun: qwen32b 失败"}
    assert card["header"]["template"] == "red"
    assert card["elements"][0]["tag"] == "div" and card["elements"][0]["text"]["tag"] == "lark_md"
    assert "npu[1-2]" in card["elements"][0]["text"]["content"]


def test_feishu_gets_text_when_wanted() -> None:
    values = body("lark", style="text")
    assert values["msg_type"] == "text" and values["content"]["text"].startswith("ascendrun: qwen32b FAILED\n")


def test_feishu_is_signed_in_the_body_in_seconds() -> None:
    values = body("feishu", secret="secret-x")
    assert values["timestamp"] == "1599360473"
    # printf '' | openssl dgst -sha256 -hmac "$(printf '1599360473\nsecret-x')" -binary | base64
    assert values["sign"] == "4x8r8x5LoLNzlTgtSz6wG/O66/cf1AECcBsCsozx7eU=" == sign_feishu("1599360473", "secret-x")


def test_dingtalk_gets_markdown_with_a_title() -> None:
    values = body("dingtalk")
    assert set(values) == {"msgtype", "markdown"} and values["msgtype"] == "markdown"
    assert set(values["markdown"]) == {"title", "text"} and "ascendrun" in values["markdown"]["title"]
    assert body("dingtalk", style="text") == {"msgtype": "text", "text": {"content": body("slack")["text"]}}


def test_dingtalk_is_signed_in_the_url_in_milliseconds() -> None:
    request = ask("dingtalk", secret="SEC-y", url="https://oapi.dingtalk.com/robot/send?access_token=abc")
    query = parse_qs(urlsplit(request.url).query, strict_parsing=True)
    assert query["access_token"] == ["abc"] and query["timestamp"] == ["1599360473700"]
    assert query["sign"] == [sign_dingtalk("1599360473700", "SEC-y")]
    # printf '1599360473000\nSEC-y' | openssl dgst -sha256 -hmac SEC-y -binary | base64
    assert sign_dingtalk("1599360473000", "SEC-y") == "FQQAlgSo9mGyrJPdszZPYf0WM0xA24W1oA8BnVUkVFo="


def test_wecom_gets_markdown_or_text() -> None:
    values = body("wecom")
    assert set(values) == {"msgtype", "markdown"} and set(values["markdown"]) == {"content"}
    assert values["markdown"]["content"].startswith('<font color="warning">ascendrun: qwen32b FAILED</font>')
    assert set(body("wecom", style="text")["text"]) == {"content"}


def test_slack_gets_blocks_and_a_text_for_notifications() -> None:
    values = body("slack")
    assert set(values) == {"text", "blocks"}
    header, section = values["blocks"]
    assert header == {"type": "header", "text": {"type": "plain_text", "text": "ascendrun: qwen32b FAILED"}}
    assert section["type"] == "section" and section["text"]["type"] == "mrkdwn"
    assert set(body("slack", style="text")) == {"text"}


def test_the_generic_format_has_its_documented_fields_and_a_signature_over_time_and_body() -> None:
    request = ask("generic", secret="k")
    values = json.loads(request.body)
    assert set(values) == set("schema_version id kind at head lang title text reason is_bad event job".split())
    assert (values["schema_version"], values["id"], values["kind"]) == (2, NOTICE.id, "failed")
    assert values["at"] == "2020-09-06T02:47:53.000Z" and values["job"]["hosts"] == ["npu1", "npu2"]
    assert set(values["job"]) == set("id name state attempt hosts nodes ranks created_at started_at ended_at".split())
    assert request.headers["Idempotency-Key"] == NOTICE.id
    signed = request.headers["X-Ascendrun-Timestamp"].encode() + b"\n" + request.body
    digest = hmac.new(b"k", signed, hashlib.sha256).hexdigest()
    assert request.headers["X-Ascendrun-Signature"] == f"sha256={digest}"


def test_a_dead_mans_switch_gets_a_bare_get_on_its_path() -> None:
    target = Target(name="deadman", type="deadman", suffixes={"failed": "/fail"})
    request = make_request(NOTICE, target, url="https://hc.example/uuid/?a=1", secret=None, now_s=1.0)
    assert (request.url, request.body) == ("https://hc.example/uuid/fail?a=1", None)
    assert append_path("https://hc.example/uuid", "") == "https://hc.example/uuid"


@pytest.mark.parametrize("kind", ["feishu", "lark", "dingtalk", "wecom", "slack"])
@pytest.mark.parametrize("style", ["rich", "text"])
def test_nobody_is_called_and_nothing_is_linked_by_what_a_program_printed(kind: str, style: str) -> None:
    text = json.dumps(
        body(kind, style=style, notice=replace(NOTICE, reason=because("rejected", why=EVIL))), ensure_ascii=False
    )
    assert "<at " not in text and "<!channel>" not in text
    if style == "rich":
        assert "](http" not in text or kind == "slack"  # Slack's links are <url|text>, and it gets &lt;
        assert "<@" not in text


@pytest.mark.parametrize("kind, limit", [("feishu", 20_000), ("dingtalk", 20_000), ("wecom", 4600), ("slack", 24_000)])
@pytest.mark.parametrize("style", ["rich", "text"])
def test_no_body_is_larger_than_its_service_takes(kind: str, limit: int, style: str) -> None:
    hosts = tuple(f"主机-{number}" for number in range(3000))
    notice = replace(NOTICE, reason=because("rejected", why="错误" * 5000), name="x" * 300, hosts=hosts)
    request = ask(kind, style=style, notice=notice)
    assert len(request.body) <= limit
    if kind == "wecom":
        values = json.loads(request.body)
        content = values["text" if style == "text" else "markdown"]["content"]
        assert len(content.encode()) <= (2048 if style == "text" else 4096)
    if kind == "slack" and style == "rich":
        header, section = json.loads(request.body)["blocks"]
        assert len(header["text"]["text"]) <= 150 and len(section["text"]["text"]) <= 3000


def test_a_cut_never_splits_a_character() -> None:
    assert cut_bytes("错误错误", 8) == "错…" and cut_bytes("错误", 6) == "错误"


@pytest.mark.parametrize(
    "kind, status, answer, outcome",
    [
        ("dingtalk", 200, b'{"errcode":0,"errmsg":"ok"}', "delivered"),
        ("dingtalk", 200, b'{"errcode":310000,"errmsg":"sign not match"}', "refused"),
        ("dingtalk", 200, b'{"status":1111,"wait":5,"errcode":130101,"errmsg":"send too fast"}', "retry"),
        ("feishu", 200, b'{"StatusCode":0,"StatusMessage":"success","code":0,"data":{},"msg":"success"}', "delivered"),
        ("feishu", 200, b'{"StatusCode":0,"StatusMessage":"success"}', "delivered"),
        ("feishu", 200, b'{"code":19021,"msg":"sign match fail","data":{}}', "refused"),
        ("feishu", 400, b'{"code":9499,"msg":"Bad Request","data":{}}', "refused"),
        ("lark", 200, b'{"code":11232,"msg":"frequency limited"}', "retry"),
        ("wecom", 200, b'{"errcode":0,"errmsg":"ok"}', "delivered"),
        ("wecom", 200, b'{"errcode":93000,"errmsg":"invalid webhook url"}', "refused"),
        ("wecom", 200, b'{"errcode":45009,"errmsg":"api freq out of limit"}', "retry"),
        ("wecom", 200, b"<html>sign in to the network</html>", "retry"),
        ("wecom", 200, b'{"errcode":true}', "retry"),
        ("slack", 200, b"ok", "delivered"),
        ("slack", 400, b"invalid_payload", "refused"),
        ("slack", 404, b"no_service", "refused"),
        ("slack", 429, b"", "retry"),
        ("generic", 204, b"", "delivered"),
        ("generic", 500, b"oops", "retry"),
        ("generic", 302, b"", "refused"),
        ("generic", 408, b"", "retry"),
        ("deadman", 200, b"OK", "delivered"),
        ("hook", 200, b"", "delivered"),
    ],
)
def test_an_answer_means(kind: str, status: int, answer: bytes, outcome: str) -> None:
    verdict = read_reply(kind, status, {}, answer)
    assert verdict.outcome == outcome and str(status) in str(verdict.reply)


def test_retry_after_is_read_in_seconds_whatever_the_case() -> None:
    assert read_reply("slack", 429, {"retry-AFTER": "30"}, b"").wait_s == 30.0
    assert read_reply("slack", 429, {"Retry-After": "Fri, 20 Nov 2026 10:00:00 GMT"}, b"").wait_s is None


def test_who_sent_dingtalk_too_much_waits_out_its_ten_minutes() -> None:
    assert read_reply("dingtalk", 200, {}, b'{"errcode":130101}').wait_s == 600.0


def test_of_a_long_answer_the_beginning_is_shown() -> None:
    assert len(read_reply("generic", 500, {}, b"x" * 100_000).reply) < 400
