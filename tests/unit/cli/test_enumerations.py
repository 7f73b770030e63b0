"""Enumerations on a screen have the comma of its language."""

from collections.abc import Callable

import pytest

from ascendrun.cli.commands.show import _directories
from ascendrun.cli.commands.verify import print_report
from ascendrun.cli.report.page import stage_cells
from ascendrun.health.report.data import StageRow
from ascendrun.health.verify import Claim, ClaimOutcome, make_verify_report
from ascendrun.text import use_language


def scores() -> str:
    return stage_cells(StageRow("a", "j-0001", "SUCCEEDED", 1.0, *[None] * 5, {"core": 1, "bits": 2}))["scores"]


def directories() -> str:
    return _directories({"n1": "/a", "n2": "/b"})


@pytest.mark.parametrize(
    ("make", "in_english", "in_chinese"),
    [(scores, "core 1, bits 2", "core 1、bits 2"), (directories, "n1:/a, n2:/b", "n1:/a、n2:/b")],
)
def test_an_enumeration_has_the_comma_of_the_language(
    make: Callable[[], str], in_english: str, in_chinese: str
) -> None:
    assert make() == in_english
    use_language("zh")
    assert make() == in_chinese


def test_the_values_of_a_measured_claim_have_the_comma_of_the_language(capsys: pytest.CaptureFixture[str]) -> None:
    claim = Claim("plan-memory", ClaimOutcome.MEASURED, values={"n1": 3, "n2": 4})
    use_language("zh")
    print_report(make_verify_report([], [claim], ["n1", "n2"], {}))
    assert "n1 3、n2 4" in capsys.readouterr().out
