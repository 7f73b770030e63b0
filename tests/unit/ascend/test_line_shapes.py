"""What depends on the shape of a line is found once, and the numbers of each line still count."""

import re

from ascendrun.ascend.line_shapes import SHAPES_KEPT, is_work, shape_of
from ascendrun.ascend.peer_messages import read_messages
from ascendrun.ascend.signatures import _Catalogue, scan, signatures
from ascendrun.ascend.vocabularies import wording


def codes_of(texts):
    return [(hit.line, hit.signature.code, dict(hit.values)) for hit in scan(enumerate(texts))]


def test_lines_of_one_shape_have_the_codes_of_their_own_numbers():
    lost, harmless = (f"[rank3]: NPU function error: c10_npu::f, error code is {code}" for code in (507054, 999999))
    assert shape_of(lost) == shape_of(harmless)
    assert [code for _, code, _ in codes_of([harmless, lost, harmless])] == ["ACL-507054"]


def test_an_error_id_is_that_of_its_line():
    first, second = (f"{code}: [PID: 1] 2026-11-20-10:00:00 text" for code in ("EI0002", "EI0006"))
    assert [code for _, code, _ in codes_of([first, second, first])] == ["EI0002", "EI0006", "EI0002"]


def test_what_was_read_before_changes_nothing():
    examples = [example for row in signatures() for example in row.examples]
    others = [example.translate(str.maketrans("0123456789", "5678901234")) for example in examples]
    fresh = _Catalogue(signatures())
    before = [[hit.signature.code for hit in fresh.search([0], [example])] for example in examples]
    list(scan(enumerate(others)))
    assert [[hit.signature.code for hit in scan([(0, example)])] for example in examples] == before


def test_messages_about_others_need_their_own_numbers():
    refused, timed_out = (
        f"[c10d] The client socket has failed to connect to [npu02]:29511 (errno: {number} - x)"
        for number in (111, 222)
    )
    for _ in range(2):
        assert "tried" in {message.kind for message in read_messages(refused)}
        assert "tried" not in {message.kind for message in read_messages(timed_out)}


def test_whether_a_line_is_work_depends_only_on_its_shape():
    named = re.sub(r"\\d|\[0-9\]|\{[\d,]+\}", "", wording("quiet").pattern)
    assert not re.search(r"\d", named)
    assert is_work("step 12 loss 2.5") and not is_work("  warnings.warn(") and not is_work("[W1120 10:00:00.551 x]")


def test_a_log_of_ever_new_shapes_keeps_few():
    known = _Catalogue(signatures())
    for number in range(3 * SHAPES_KEPT // 1000):
        texts = [
            f"{number:x} {each:x} gave".translate(str.maketrans("0123456789", "ghijklmnop")) for each in range(1000)
        ]
        assert list(known.search(range(1000), texts)) == []
    assert len(known._known) <= SHAPES_KEPT + 1000
