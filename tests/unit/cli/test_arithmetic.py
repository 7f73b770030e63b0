"""Before a device is taken: what a bundled program's own arithmetic is asked, and what becomes of its answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from ascendrun.cli.commands.submit import title_of
from ascendrun.core.jobfile.spec import JobSpec, load_programs
from ascendrun.query.memory_estimate import Ended, Estimate, can_estimate, estimate, judge, run_here
from ascendrun.query.submit import ValidStage
from ascendrun.text import Text


@pytest.mark.parametrize(
    "program, args, is_asked",
    [
        ("qwen_lora", {}, True),
        ("qwen_lora", {"mode": "train"}, True),
        ("qwen_lora", {"mode": "compare"}, False),
        ("qwen_lora", {"mode": "plan"}, False),
        ("meshtest", {}, False),
        ("no such program", {}, False),
    ],
)
def test_trainings_of_programs_that_know_their_arithmetic_are_reckoned(
    program: str, args: object, is_asked: bool
) -> None:
    assert can_estimate(load_programs().get(program), args) is is_asked  # type: ignore[arg-type]


def asked(args: object, *, family: str = "npu", chip: str | None = "910B3") -> list[Sequence[str]]:
    seen: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> Ended:
        seen.append(argv)
        return Ended(0, "12 M weights\n\nchosen: ddp\n", "")

    found = estimate("qwen_lora", args, ranks=16, family=family, chip=lambda: chip, run=run)  # type: ignore[arg-type]
    assert not seen or found == Estimate(True, ("12 M weights", "chosen: ddp"))
    return seen


def test_the_program_is_asked_with_the_job_s_own_arguments_for_its_ranks_and_its_chip() -> None:
    assert asked({"lr": 1e-4, "levels": ("a", "b")}) == [
        [
            sys.executable,
            "-m",
            "ascendrun.programs.qwen_lora",
            "--lr=0.0001",
            "--levels=a,b",
            "--mode=plan",
            "--world_size=16",
            "--chip=910B3",
        ]
    ]


def test_a_chip_that_the_job_names_is_not_asked_for_and_a_cpu_has_none() -> None:
    assert "--chip=910A" in asked({"chip": "910A"}, chip=None)[0]
    assert not any(word.startswith("--card") for word in asked({}, family="cpu", chip=None)[0])


def test_devices_that_nobody_knows_are_told_with_the_way_out() -> None:
    found = estimate("qwen_lora", {}, ranks=2, family="npu", chip=lambda: None, run=lambda argv: Ended(0, "", ""))
    assert found.fits is None and "--set args.chip=910B3" in str(found.lines[-1])


def test_what_does_not_fit_is_told_line_by_line_and_what_could_not_be_reckoned_is_no_verdict() -> None:
    assert judge(Ended(1, "sums\n", "ModelTooLargeError: needs 71 GB of 64 GB\ntry more cards")) == Estimate(
        False,
        (
            "sums",
            Text("estimate.too-large", "", reason="needs 71 GB of 64 GB"),
            Text("estimate.too-large", "", reason="try more cards"),
        ),
    )
    other = judge(Ended(1, "", "InvalidDataError: /data/train.json: no such file"))
    assert other.fits is None
    assert other.lines[-2] == Text("estimate.unknown", "", reason="/data/train.json: no such file")
    assert "--set args.mode=plan" in str(other.lines[-1])
    assert judge(Ended(2, "", "")).lines[0].values["reason"] == Text("estimate.exit-code", "", code=2)


def test_of_a_pipeline_the_stage_is_named_and_what_it_waits_for() -> None:
    spec = JobSpec(name="ships", program="trajectory")
    assert title_of(ValidStage(None, None, spec, ()), "j-new").values == {"job": "j-new"}
    assert title_of(ValidStage("prepare", None, spec, ()), "j-new").values == {"stage": "prepare"}
    assert title_of(ValidStage("tune", "prepare", spec, ()), "j-new").values == {"stage": "tune", "needs": "prepare"}


def test_a_command_s_error_file_and_else_its_last_words_tell_why() -> None:
    write = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(%r); print('sums'); raise SystemExit(1)"
    told = run_here([sys.executable, "-c", write % '{"message": {"message": "ModelTooLargeError: 9 of 8 GB"}}'])
    assert told == Ended(1, "sums\n", "ModelTooLargeError: 9 of 8 GB")
    assert run_here([sys.executable, "-c", "raise SystemExit('wrong option')"]) == Ended(1, "", "wrong option")
