"""Credentials are found by value, by name and by form; evidence stays."""

import base64
import json
import re
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.logs.redaction import Redactor, hide_values, redact_text, redact_tree, secrets_in_tree

KEY = "\n".join(
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAA",
        "QyNTUxOQAAACB0b3BzZWNyZXR0b3BzZWNyZXR0b3BzZWNyZXQ",
        "-----END OPENSSH PRIVATE KEY-----",
    ]
)

SECRETS = [
    ("export WANDB_API_KEY=abcdef0123456789", "abcdef0123456789"),
    ('{"password": "my pass word"}', "pass word"),
    (r'{"text": "{\"password\": \"my pass word\"}"}', "pass word"),
    ("db_password: hunter2;drop", "hunter2;drop"),
    ("--token tok-9a8b7c6d5e", "tok-9a8b7c6d5e"),
    ('["train.py", "--hub-token", "s3cr3tValue99"]', "s3cr3tValue99"),
    ("--api-key=zyxwv98765", "zyxwv98765"),
    ("sshpass -p letmein99 ssh node1", "letmein99"),
    ("https://me:p4ssw0rd!@host.example/x", "p4ssw0rd!"),
    ("git clone https://aVeryLongToken1@git.example/x", "aVeryLongToken1"),
    ("https://oapi.dingtalk.com/robot/send?access_token=0123deadbeef&x=1", "0123deadbeef"),
    ("https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=693axxx6-7aoc", "693axxx6-7aoc"),
    ("https://open.feishu.cn/open-apis/bot/v2/hook/5e3d587e-d78e-4a07", "5e3d587e-d78e-4a07"),
    ("https://hooks.slack.com/services/T00/B00/XXXXabc", "T00/B00/XXXXabc"),
    ("https://hc-ping.com/0c8983c9-9d73-446f", "0c8983c9-9d73-446f"),
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
    ("Cookie: session=1a2b3c; theme=dark", "1a2b3c"),
    ("AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
    ("hf_abcdefghijklmnopqrstuvwxyz", "hf_abcdefghijklmnop"),
    ("ghp_0123456789abcdef0123456789abcdef0123", "ghp_0123456789abcdef"),
    ("glpat-abcdefghij0123456789", "abcdefghij0123456789"),
    ("xoxb-1234567890-abcdef", "1234567890-abcdef"),
    ("sk-proj-abcdefghij0123456789", "abcdefghij0123456789"),
    ("LTAI5tAbCdEfGhIjKlMn", "5tAbCdEfGhIj"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "eyJzdWIiOiIxMjM0In0"),
    ("SEC" + "0a1b2c3d" * 8, "0a1b2c3d0a1b"),
    ("id Xk29fLq0Zt8Vb3Nw7Rj5Yc1Hd6Ms4Pg8T end", "Xk29fLq0Zt8Vb3Nw7Rj5Yc1Hd6Ms4Pg8T"),
    (KEY, "b3BlbnNzaC1rZXktdjE"),
    (json.dumps({"file": KEY}), "QyNTUxOQAAACB0b3Bz"),
    (KEY[:90], "b3BlbnNzaC1rZXktdjE"),
    (KEY[45:], "QyNTUxOQAAACB0b3Bz"),
    ("MY_SK=abcd1234", "abcd1234"),
    ("password='错误的密码'", "错误的密码"),
]

EVIDENCE = [
    "[rank3] step 120 loss 2.31 tokens/s 15300 num_tokens=4096 tokens: 12345",
    "eos_token='</s>' tokenizer=/models/qwen pad_token_id=151643 token_id: 17 image_token=<image>",
    "[ERROR] HCCL(1234,python):2026-11-20-14:00:00.123.456 [hccl_socket.cc:72] EI0006 tag=AllReduce_10.0.0.1_16666",
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "_ZN4c10d16ProcessGroupHCCL8WorkHCCL11isCompletedEv+0x123 (0x7f00deadbeef)",
    "ssh://git@host/repo.git http://10.0.0.3:8080/x key: value monkey=1 password: None secret=null",
    "boot_id 3f1c2d4e-5a6b-7c8d-9e0f-112233445566 Traceback (most recent call last):",
    '  File "/opt/conda/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1234, in wrapper',
    "ASCEND_PROCESS_LOG_PATH=/root/ascend/log HCCL_CONNECT_TIMEOUT=1200 MASTER_ADDR=10.0.0.1",
    "token=512, loss=2.31 max_token=4096",
]


@pytest.mark.parametrize("text, secret", SECRETS, ids=[text[:30] for text, _ in SECRETS])
def test_a_credential_is_found_in(text: str, secret: str) -> None:
    assert secret in text or secret in json.loads(text)["text" if "text" in text else "file"]
    clean = redact_text(f"before: {text} after")
    assert secret not in clean and "[redacted 1" in clean and clean.startswith("before:")


@pytest.mark.parametrize("text", EVIDENCE, ids=[text[:30] for text in EVIDENCE])
def test_evidence_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_the_same_secret_gets_the_same_mark_everywhere() -> None:
    redactor = Redactor()
    first = redactor.redact(b"HF_TOKEN=hf_abcdefghijklmnopqrst")
    other = redactor.redact(b"AKIAABCDEFGHIJKLMNOP and hf_abcdefghijklmnopqrst")
    assert b"[redacted 1:" in first and b"[redacted 2:" in other and b"[redacted 1:" in other


def test_what_stands_once_behind_its_name_is_then_found_bare_and_earlier() -> None:
    redactor = Redactor()
    files = [b"connecting with q1w2e3r4t5 now", b"DB_PASSWORD=q1w2e3r4t5"]
    for data in files:
        redactor.scan(data)
    assert [b"q1w2e3r4t5" in redactor.redact(data) for data in files] == [False, False]


def test_an_ordinary_word_behind_a_name_does_not_blot_out_the_texts() -> None:
    redactor = Redactor()
    redactor.scan(b"password: incorrect, try again")
    assert redactor.redact(b"the answer was incorrect") == b"the answer was incorrect"


values = (
    st.text(min_size=4, max_size=40)
    .filter(
        lambda text: (
            text.strip() == text
            and len(text.encode("utf-8", "surrogateescape" if text.isprintable() else "replace")) >= 4
        )
    )
    .filter(lambda text: not any("\ud800" <= character <= "\udfff" for character in text))
    .filter(lambda text: not set(text) <= set("[]redacted 0123456789:knowndigit-"))
)


@given(
    values,
    st.binary(max_size=60),
    st.binary(max_size=60),
    st.sampled_from(["plain", "json", "url", "base64", "assignment", "repr"]),
)
def test_a_known_value_is_hidden_in_any_bytes_and_any_usual_dress(
    value: str, before: bytes, after: bytes, dress: str
) -> None:
    raw = value.encode()
    worn = {
        "plain": raw,
        "json": json.dumps(value).encode(),
        "url": quote(raw, safe="").encode(),
        "base64": base64.b64encode(raw).rstrip(b"="),
        "assignment": b"X=" + raw,
        "repr": repr(value).encode(),
    }[dress]
    if dress == "base64" and len(raw) < 8:
        return
    clean = Redactor({value: "known"}).redact(before + worn + after)
    assert raw not in clean
    assert worn.strip(b"\"'") not in clean


@given(st.lists(st.text("ab", min_size=4, max_size=12), min_size=1, max_size=40))
def test_of_many_values_that_share_their_beginnings_all_are_hidden(many: list[str]) -> None:
    redactor = Redactor(dict.fromkeys(many, "known"))
    clean = redactor.redact_text(" ".join(f"<{value}>" for value in many))
    marks = [int(number) for number in re.findall(r"<\[redacted (\d+): known\]>", clean)]
    assert len(marks) == len(many) and len(set(marks)) == len(set(many))


def test_hundreds_of_values_each_the_beginning_of_the_next_are_hidden() -> None:
    values = ["x1" * count for count in range(2, 400)]
    assert "x1" not in Redactor(dict.fromkeys(values, "known")).redact_text(" ".join(values))


@given(st.binary(max_size=300))
def test_bytes_that_are_no_text_survive(data: bytes) -> None:
    redactor = Redactor()
    clean = redactor.redact(data)
    assert clean == data or redactor.count > 0


def test_what_is_redacted_twice_does_not_change_again() -> None:
    text = "\n".join(text for text, _ in SECRETS)
    once = redact_text(text)
    assert redact_text(once) == once


def test_a_tree_loses_the_values_of_names_that_say_secret() -> None:
    tree: Any = {"env": {"HF_TOKEN": "ab", "LR": "1e-5", "DB_PASSWORD": "q1w2e3r4"}, "command": ["--x", "q1w2e3r4"]}
    clean: Any = redact_tree(tree, Redactor(secrets_in_tree(tree)))
    assert clean["env"]["LR"] == "1e-5" and "q1w2e3r4" not in json.dumps(clean) and clean["env"]["HF_TOKEN"] != "ab"


def test_messages_lose_what_they_were_told_to_lose() -> None:
    assert hide_values("cannot reach https://x/abcd1234?k=1", ["https://x/abcd1234?k=1", None]).startswith(
        "cannot reach [redacted"
    )
