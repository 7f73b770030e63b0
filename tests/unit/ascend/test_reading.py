"""A damaged answer never raises and never yields a wrong number.

What a number must be to be believed: a whole word of the damaged text, within its physical range, in a row or block
of the very chip that it is told of.
"""

import dataclasses
import os
import random
import re
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.ascend.hccn import parse_stat
from ascendrun.ascend.kinds import TOOLS
from ascendrun.ascend.reading import ToolError
from tests.lib.ascend_recordings import NAMES, PARSERS, RECORDINGS, read

COUNT = int(os.environ.get("MUTATIONS", "50"))  # of each recording; 10000 is the long run
LETTERS = "0123456789|:.,-+= \t%()[]/aAxXNUP\r\x00\x1b\u0663\uff15\u2028"
WORD = re.compile(r"(?<![0-9])-?[0-9]+(?:\.[0-9]+)?")
HEX = re.compile(r"0[xX][0-9a-fA-F]+")


def mutate(text, rng):
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(MUTATIONS)(text, rng)
    return text


def at(text, rng):
    return rng.randrange(len(text) + 1)


def lose_letter(text, rng):
    n = at(text, rng)
    return text[:n] + text[n + 1 :]


def put_letter(text, rng):
    n = at(text, rng)
    return text[:n] + rng.choice(LETTERS) + text[n:]


def change_letter(text, rng):
    n = at(text, rng)
    return text[:n] + rng.choice(LETTERS) + text[n + 1 :]


def cut(text, rng):
    return text[: at(text, rng)]


def lose_head(text, rng):
    return text[at(text, rng) :]


def lose_span(text, rng):
    n = at(text, rng)
    return text[:n] + text[n + rng.randrange(1, 30) :]


def repeat_digit(text, rng):
    digits = [n for n, letter in enumerate(text) if letter.isdigit()]
    n = rng.choice(digits) if digits else 0
    return text[:n] + text[n : n + 1] * rng.choice((2, 3, 25)) + text[n + 1 :]


def _lines(change):
    def mutation(text, rng):
        lines = text.split("\n")
        change(lines, rng)
        return "\n".join(lines)

    return mutation


def _lose_line(lines, rng):
    lines.pop(rng.randrange(len(lines)))


def _repeat_line(lines, rng):
    n = rng.randrange(len(lines))
    lines.insert(n, lines[n])


def _swap_lines(lines, rng):
    n, m = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[n], lines[m] = lines[m], lines[n]


def _join_lines(lines, rng):
    n = rng.randrange(len(lines))
    lines[n : n + 2] = ["".join(lines[n : n + 2])]


def _noise(lines, rng):
    noise = ("[WARNING] something", "|", "+--+", ":", "=", "Killed", " : 7")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(noise))


MUTATIONS = [lose_letter, put_letter, change_letter, cut, lose_head, lose_span, repeat_digit]
MUTATIONS += [_lines(change) for change in (_lose_line, _repeat_line, _swap_lines, _join_lines, _noise)]


def leaves(value, name=""):
    """Every name and plain value of a reading; errors are ours, not the tool's numbers."""
    if isinstance(value, ToolError):
        return
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in ("unparsed", "faults"):
                yield from leaves(getattr(value, field.name), field.name)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from leaves(one, name)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, one in value.items():
            yield from leaves(one, f"{name}.{key}")
    elif value is not None:
        yield name, value


def numbers_in(text):
    words = [word for whole in WORD.findall(text) for word in (whole, whole.lstrip("-"))]
    numbers = {float(word) if "." in word else int(word) for word in words if len(word) < 4000}
    return numbers | {int(word, 16) for word in HEX.findall(text)}


def believable(text, *, may_be_cut):
    """The numbers that stand in the text as whole words; one that ends a cut text may have lost digits."""
    head, _, tail = text.rpartition("\n")
    return numbers_in(head + "\n" + re.sub(r"[0-9.]+$", "", tail) if may_be_cut else text)


IN_RANGE = (
    (re.compile(r".*percent$"), 0, 100),
    (re.compile(r".*_c$"), -60, 200),
    (re.compile(r".*_mb$"), 0, 4 * 2**20),
    (re.compile(r".*power_w$"), 0, 5000),
    (re.compile(r"^pid$"), 1, 2**22),
    (re.compile(r".*_port$"), 1, 65535),
    (re.compile(r"mtu_bytes"), 68, 65535),
)


def check(kind, text):
    reading = PARSERS[kind](text)
    known = believable(text, may_be_cut=kind in TOOLS)
    flat = "".join(text.split())
    for name, value in leaves(reading):
        if isinstance(value, bool):
            continue
        if isinstance(value, datetime):
            assert str(value.year) in text, (name, value)
        elif isinstance(value, (int, float)):
            assert value in known, (name, value)
            for pattern, low, high in IN_RANGE:
                assert not pattern.match(name) or low <= value <= high, (name, value)
        elif name not in ("layout", "version", "kind", "code"):
            assert "".join(value.split()) in flat or "\\" in text, (name, value)
    return reading


def rows_of(text):
    return [line.strip() for line in text.replace("\r\n", "\n").split("\n")]


def check_rows(reading, text):
    """Each chip's numbers stand in two rows that follow each other, the first of which begins with its NPU's id."""
    rows = [{float(word) for word in re.findall(r"-?[0-9]+(?:\.[0-9]+)?", row)} for row in rows_of(text)]
    begins = [re.match(r"\|\s*([0-9]+)\s", row) for row in rows_of(text)]
    for chip in reading.chips:
        for used, total in (("hbm_used_mb", "hbm_total_mb"), ("ddr_used_mb", "ddr_total_mb")):
            pair = getattr(chip, used), getattr(chip, total)
            assert None in pair or pair[0] <= pair[1], chip
        first = {chip.power_w, chip.temperature_c, chip.hugepages_used, chip.hugepages_total} - {None}
        second = {chip.chip_id, chip.phy_id, chip.logic_id, chip.load_percent}
        second |= {chip.ddr_used_mb, chip.ddr_total_mb, chip.hbm_used_mb, chip.hbm_total_mb}
        second -= {None}
        assert any(
            begin and int(begin[1]) == chip.npu_id and first <= rows[n] and (not second or second <= rows[n + 1])
            for n, begin in enumerate(begins)
            if n + 1 < len(rows)
        ), chip


def has_doubles(block):
    lines = [line for line in block.split("\n") if ":" in line and "Process id:" not in line]
    names = [name for name in (line.partition(":")[0].strip(" \t") for line in lines) if name]
    return len(set(names)) < len(names)


def check_blocks(reading, text):
    """Each chip's numbers stand in one block with its id, and the block is nobody else's."""
    blocks = re.split(r"\n[ \t\r]*\n", text)
    for chip in reading.chips:
        if getattr(chip, "chip_id", None) is None or type(chip).__name__ == "ChipHealth":
            continue
        mine = [one for one in blocks if re.search(rf"Chip ID\s*:\s*0*{chip.chip_id}\s*$", one, re.MULTILINE)]
        mine = [one for one in mine if not has_doubles(one)]
        values = {value for _, value in leaves(chip) if isinstance(value, (int, float))}
        assert any(values <= numbers_in(one) for one in mine), chip


CHECKS = {"npu_smi_info": check_rows}
CHECKS.update(dict.fromkeys(("common", "ecc"), check_blocks))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_no_damage_makes_a_parser_raise_or_tell_a_wrong_number(path):
    rng = random.Random(path.stem)
    kind, text = path.parent.name, read(path)
    for n in range(COUNT):
        damaged = mutate(text, rng)
        try:
            reading = check(kind, damaged)
            CHECKS.get(kind, lambda reading, text: None)(reading, damaged)
        except Exception as error:  # whatever it is, the text that led to it is needed
            raise AssertionError(f"mutation {n}: {error!r}\n{damaged}") from error


@pytest.mark.parametrize("path", [path for path in RECORDINGS if path.stem.startswith("L")], ids=lambda path: path.stem)
def test_damage_to_one_row_leaves_every_other_chip_as_it_was(path):
    rng = random.Random(path.stem)
    lines = read(path).split("\n")
    whole = PARSERS["npu_smi_info"](read(path))
    second_rows = [n for n, line in enumerate(lines) if re.search(r"\| +(0000:|NA)", line) and "OK " not in line]
    second_rows = [n for n in second_rows if lines[n - 1].startswith("|") and "Name" not in lines[n - 1]]
    assert len(second_rows) == len(whole.chips)
    for _ in range(COUNT):
        hit = rng.randrange(len(whole.chips))
        row = second_rows[hit] - rng.choice((0, 1))
        line = lines[row]
        while line == lines[row] or "\n" in line:
            line = mutate(lines[row], rng)
        found = PARSERS["npu_smi_info"]("\n".join([*lines[:row], line, *lines[row + 1 :]])).chips
        others = [chip for n, chip in enumerate(whole.chips) if n != hit]
        key = {(chip.npu_id, chip.chip_id) for chip in found}
        for chip in others:
            hidden = len([one for one in found if (one.npu_id, one.chip_id) == (chip.npu_id, chip.chip_id)])
            doubled = chip not in found and (chip.npu_id, chip.chip_id) in key and hidden == 1
            assert chip in found or doubled, (line, chip)


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_at_all_makes_a_parser_raise(kind, data):
    texts = [read(path) for path in RECORDINGS if path.parent.name == kind]
    fragment = st.one_of(
        st.text(max_size=40), st.sampled_from([line for text in texts for line in text.split("\n")]),
        st.sampled_from(["9" * 5000, "\u0661", "nan", "1e400", "[" * 3000, '{"a":' * 2000, "\ud800"]),
    )  # fmt: skip
    PARSERS[kind]("\n".join(data.draw(st.lists(fragment, max_size=12))))


def test_counters_are_the_same_whether_the_text_is_read_at_once_or_by_lines():
    text = "packet statistics:\n" + "".join(f"mac_rx_{name}_num:{n}\n" for n, name in enumerate("abcd", start=9)) + "\n"
    assert parse_stat(text).values == {f"mac_rx_{name}_num": n for n, name in enumerate("abcd", start=9)}
    rng = random.Random(7)
    for _ in range(20 * COUNT):
        mutated = mutate(text, rng)
        assert parse_stat(mutated) == parse_stat("\n" + mutated), mutated
