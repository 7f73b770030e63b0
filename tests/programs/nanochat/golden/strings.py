"""2,000 strings of all kinds that a tokenizer meets, by a formula."""

KINDS = (
    "the quick brown fox jumps over lazy dogs and they're HAPPY it's WE'LL don't ",
    "中文字符今天天气很好，我们去公园。日本語テキスト한국어문장",
    "😀👩‍👩‍👧🇨🇳🏳️‍🌈✨éüñçßøÅ e\u0301 ﬁ",
    "0123456789 1,234.5 12345678 ½ ² ١٢٣ Ⅳ ",
    " \t\n\r\n  \u00a0\u2003\u3000\n\n\t ",
    "def f(x):\n    return x**2 != [y for y in z];  // <tag/> {'k': 1}\n\n",
    "<|bos|><|user_start|>hi<|user_end|> <|endoftext|> <|",
    "\ufffd\u0000\u200b\ud7ff\ue000\U0010ffff...---___###",
)


def strings(count: int = 2000) -> list[str]:
    found, state = [], 12345
    for number in range(count):
        text = ""
        for _ in range(1 + number % 9):
            state = (state * 1103515245 + 12345) % (1 << 31)
            kind = KINDS[state // 7 % len(KINDS)]
            start, length = state // 101 % len(kind), 1 + state // 1009 % 24
            text += (kind + kind)[start : start + length]
        found.append(text)
    return found
