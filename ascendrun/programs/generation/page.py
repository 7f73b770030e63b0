"""The page of a server for browsers: a chat, or DNA for a protein. It loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import re
import string
from functools import cache
from pathlib import Path

from ascendrun.text import translations

TEXTS = (
    *("page-avoid", "page-count", "page-limit", "page-message", "page-new_chat", "page-optimize", "page-organism"),
    *("page-protein", "page-send", "page-stop", "page-temperature", "page-token"),
)
"""Messages; the rest of the name is that of a place in page.html."""
INLINE = re.compile(r"<(?P<kind>style|script)>(?P<text>.*?)</(?P=kind)>", re.DOTALL)


@cache
def make_page(lang: str) -> str:
    """Return the page in a language: en or zh."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    messages = translations(lang)
    texts = {name.partition("-")[2]: html.escape(messages[f"program.{name}"]) for name in TEXTS}
    return string.Template(template).substitute(texts, lang=lang)


def headers_of(page: str) -> dict[str, str]:
    """Return headers that allow the page its own style and script, and requests to this server, and nothing else."""
    allowed = {"style": "", "script": ""}
    for found in INLINE.finditer(page):
        digest = base64.b64encode(hashlib.sha256(found["text"].encode()).digest()).decode()
        allowed[found["kind"]] = f"{found['kind']}-src 'sha256-{digest}'"
    rules = ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", *allowed.values())
    return {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
