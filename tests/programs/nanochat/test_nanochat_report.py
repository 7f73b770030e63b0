"""The page on the stages of a training: what each did, and the scores before and after it."""

import json

from tests.programs.nanochat.test_nanochat_stages import BASE, TOKENIZER


def test_a_page_has_the_work_of_each_stage_and_the_scores_of_each_model(launch, tmp_path):
    launch("nanochat", [*TOKENIZER, "--output_dir=tok"], name="job").succeed()
    own = ("--tokenizer_dir=tok", "--output_dir=base", f"--data_cache_dir={tmp_path / 'cache'}")
    base = launch("nanochat", [*BASE, *own, "--peak_tflops=1"], name="job").succeed()
    for number, score in ((1, 0.25), (2, 0.75)):
        folder = base.folder / f"scores-{number}"
        folder.mkdir()
        reply = {"number": 0, "reply": "1 | 2\n", "answer": "3"}
        task = {"questions": 9, "score": score, "centered": score, "chance": 0.0, "samples": [reply]}
        (folder / "evaluation.json").write_text(json.dumps({"model": f"m{number}", "tasks": {"sums": task}}))
    options = ["--mode=report", "--report_dirs=tok,base,scores-1,scores-2", "--output_dir=report"]
    run = launch("nanochat", options, name="job").succeed()
    page = (run.folder / "report" / "report.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"]
    trained = json.loads((run.folder / "base" / "report.json").read_text())
    (work,) = (row for row in rows if row[0] == "base" and len(row) == 8)
    assert work[1:4] == [f"{trained['model']['weights']:,}", "12", f"{12 * 256:,}"]
    assert work[4].replace(",", "").isdigit() and work[5].endswith("%") and float(work[7]) >= 0
    assert trained["run"]["ranks"] == 1 and trained["run"]["steps"] == 12
    assert [row[1] for row in rows if row[0] == "base" and len(row) == 3] == ["6", "12"]  # first and last evaluation
    assert ["", "m1", "m2"] in rows and ["sums score", "0.2500", "0.7500"] in rows
    assert "1 \\| 2" in page

    for wrong in ("--report_dirs=base,none", "--report_dirs="):
        failed = launch("nanochat", ["--mode=report", wrong, "--output_dir=report"], name="job")
        assert failed.wait() != [0] and "Traceback" not in failed.text()
