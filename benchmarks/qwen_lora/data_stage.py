"""Cost of the data of a start, beside another checkout: first build, second start, memory of a further rank.

    python -m benchmarks.qwen_lora.data_stage DATA.json --base ../base [--rows 99000] [--rounds 1]

DATA.json: instruct rows, joined by twos and repeated with a number in front up to --rows, so that no two are equal. The
other checkout (one that encodes every sample at every start) and this one take turns on one core, in processes of
their own; their CPU time counts, which other processes of the machine hardly change. The first build is also made with
a process on each core, and its wall time compared. Writes results/data_stage.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results") / "data_stage.json"
REPO = Path(__file__).resolve().parents[2]
COMMON = """
import json, os, sys, time
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pathlib import Path
data, tokenizer_file, cache, own = sys.argv[1:5]
if own:
    from ascendrun.programs.qwen_lora import chat_template, dataset
    given = [f"--data_path={data}", f"--data_cache_dir={cache}"]
else:  # the names of b87d4b6
    from ascendrun.programs.qwen_lora import chat as chat_template, lessons as dataset
    given = [f"--data={data}"]
from ascendrun.programs.qwen_lora.__main__ import OPTIONS
from ascendrun.programs.trainer import options as table
options = table.parse(given, table.read_table(OPTIONS))
tokenizer = chat_template.wrap_tokenizer(Path(tokenizer_file).read_text())
tokenizer("warm", add_special_tokens=False)
tokenizer.apply_chat_template([{"role": "user", "content": "warm"}], tokenize=False)
def anonymous():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous")))
before, cpu, wall = anonymous(), time.process_time(), time.perf_counter()
texts = dataset.read_texts(options)
digest = texts.digest
lessons = dataset.make_lessons(texts, tokenizer, options)
course = dataset.make_course(lessons, options, world_size=1)
found = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
for step in range(4):
    lessons.train.batch(course.units(step)[:2])
found.update(bytes=anonymous() - before, rows=len(lessons.train.samples))
if own:
    manifest = lessons.train.samples.manifest
    found.update(tokens=manifest["tokens"], token_bytes=manifest["tokens"] * int(manifest["dtype"][-1]))
print(json.dumps(found))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=99_000)
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(asked.data, folder / "rows.json", asked.rows)
        make_tokenizer(folder / "rows.json", folder / "tokenizer.json")
        rounds = [measure(folder, asked.base.resolve(), number) for number in range(asked.rounds)]
    report = summary(rounds)
    of_machine = {
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }  # of other work too: wall times share it
    text = json.dumps({**report, **of_machine, "rounds": rounds}, indent=1)
    RESULTS.write_text(text + "\n")
    print(text)


def make_data(source: Path, path: Path, count: int) -> None:
    rows = json.loads(source.read_text(encoding="utf-8"))
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            row, other = (rows[(number * 2 + i) % len(rows)] for i in range(2))
            both = {key: f"{row[key]}\n{other[key]}" for key in ("instruction", "output")}
            file.write(json.dumps({"instruction": f"{number}: {both['instruction']}", "output": both["output"]}) + "\n")


def make_tokenizer(data: Path, path: Path) -> None:
    from ascendrun.facts.rows import read_conversation
    from ascendrun.programs.qwen_lora import chat_template

    with open(data, encoding="utf-8") as file:
        some = [read_conversation(json.loads(line)) for line, _ in zip(file, range(2000))]
    path.write_text(chat_template.make_tokenizer(some))


def measure(folder: Path, base: Path, number: int) -> dict[str, Any]:
    cache, other = (folder / f"{name}-{number}" for name in ("cache", "other"))
    found = {"base": run(base, folder, cache, ""), "all_cores": run(REPO, folder, other, "own", one_core="")}
    found["first"] = run(REPO, folder, cache, "own")
    return {**found, "second": run(REPO, folder, cache, "own")}


def run(tree: Path, folder: Path, cache: Path, own: str, *, one_core: str = "yes") -> dict[str, Any]:
    python = tree / ".venv" / "bin" / "python"
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ONE_CORE": one_core}
    command = [str(python if python.exists() else sys.executable), "-c", COMMON]
    given = [str(folder / "rows.json"), str(folder / "tokenizer.json"), str(cache), own]
    done = subprocess.run([*command, *given], env=environ, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(rounds: list[dict[str, Any]]) -> dict[str, float]:
    def median(of: Any) -> float:
        return round(float(statistics.median(of(each) for each in rounds)), 4)

    return {
        "first_build_of_base": median(lambda each: each["first"]["cpu_s"] / each["base"]["cpu_s"]),
        "first_build_on_all_cores": median(lambda each: each["all_cores"]["wall_s"] / each["base"]["wall_s"]),
        "second_start_of_first": median(lambda each: each["second"]["cpu_s"] / each["first"]["cpu_s"]),
        "further_rank_of_token_bytes": median(lambda each: each["second"]["bytes"] / each["second"]["token_bytes"]),
    }


if __name__ == "__main__":
    main()
