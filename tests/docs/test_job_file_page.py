"""The reference of job files is that of the code, and everything that it offers is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.keys import list_keys
from ascendrun.core.jobfile.model import UNSUPPORTED
from ascendrun.core.jobfile.spec import load_programs, parse_stages
from ascendrun.query.submit import read_stages
from ascendrun.text import translations

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("key", list_keys(), ids=lambda key: key.path)
def test_the_example_of_a_key_is_accepted(key) -> None:
    assert key.example is not None
    given = yaml.safe_load(key.example)
    base = {"name": "demo", "devices": {"type": "npu"}, **({} if "program" in given else {"command": ["x"]})}
    if "args" in given:
        base = {"name": "demo", "program": "qwen_lora"}
    devices = {**base.get("devices", {}), **given.get("devices", {})}
    stages = [{"name": "prepare"}, *given["stages"]] if "needs" in key.path else given.get("stages")
    job = {**base, **given, **({"devices": devices} if devices else {}), **({"stages": stages} if stages else {})}
    assert parse_stages(yaml.safe_dump(job), "job.yaml", programs=load_programs())


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_validate_refuses_is_not_in_the_schema(key: str) -> None:
    assert key not in {each.path for each in list_keys()}
    section, _, name = key.partition(".")
    text = f"name: j\ncommand: [x]\n{section}: {{{name}: 1}}\n" if name else f"name: j\ncommand: [x]\n{key}: 1\n"
    with pytest.raises(InvalidInputError) as caught:
        parse_stages(text, "job.yaml", programs={})
    assert "jobfile.later" in {problem.message.key for problem in caught.value.problems}


@pytest.mark.parametrize("path", sorted([*ROOT.glob("jobs/*.yaml"), *ROOT.glob("templates/*/job.yaml")]), ids=str)
def test_a_shipped_job_names_the_schema_and_uses_no_old_key(path: Path) -> None:
    first, _, text = path.read_text(encoding="utf-8").partition("\n")
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "docs" / "job.schema.json"
    assert text and read_stages(path)


@pytest.mark.parametrize("program", load_programs())
def test_keys_and_options_are_explained_in_chinese(program: str) -> None:
    table = load_programs()[program]
    texts = [key.meaning for key in list_keys()] + [table.help(option) for option in table.options.values()]
    assert not [text.key for text in texts if text.key not in translations("zh")]
    for text in texts:
        assert text.render("zh").count("{") == text.render("en").count("{")
