"""schema: the JSON Schema of job files, or one key of it."""

from __future__ import annotations

import json

import click

from ascendrun.cli.options import cli_command


@cli_command(
    "schema",
    examples="""
    ascendrun schema > job.schema.json      # then, in a job file: # yaml-language-server: $schema=job.schema.json
    ascendrun schema devices.type           # type, default, meaning and an example of one key
    ascendrun schema qwen_lora              # the options of a bundled program
    ascendrun schema qwen_lora.lora_r
""",
)
@click.argument("key", required=False)
def command(key: str | None) -> int:
    """Print the JSON Schema of job files for editors, or explain KEY: a job-file key, PROGRAM or PROGRAM.OPTION."""
    from ascendrun.core.jobfile.spec import job_json_schema

    if key is None:
        click.echo(json.dumps(job_json_schema(), indent=2, ensure_ascii=False))
        return 0
    for line in _explain(key):
        click.echo(line)
    return 0


def _explain(key: str) -> list[str]:
    """The lines about a key. Raises NotFoundError."""
    from ascendrun.core.errors import NotFoundError
    from ascendrun.core.jobfile.keys import describe_key, describe_option, describe_rows, list_keys
    from ascendrun.core.jobfile.model import RENAMED
    from ascendrun.core.jobfile.spec import load_programs
    from ascendrun.text import Text, closest, did_you_mean

    keys, programs = {each.path: each for each in list_keys()}, load_programs()
    program, _, option_name = key.partition(".")
    table = programs.get(program)
    if table is not None and not option_name:
        return list(describe_rows((option.name, str(table.help(option))) for option in table.options.values()))
    if table is not None:
        option_name = table.renamed.get(option_name, option_name)
        option = table.find(option_name)
        if option is not None:
            return list(describe_option(table, option))
        near = closest(option_name, table.options)
        raise NotFoundError(
            Text("options.unknown", "unknown option {option} of {program}", option=option_name, program=program),
            hint=did_you_mean(f"{program}.{near}") if near else None,
        )
    path = RENAMED.get(key, key)
    found = keys.get(path) or keys.get(f"stages[].{path.removeprefix('stages.')}")
    if found is not None:
        below = [each for each in keys.values() if each.path.startswith(f"{found.path}.")]
        return [*describe_key(found), *describe_rows((each.path, str(each.meaning)) for each in below)]
    near = closest(key, [*keys, *programs])
    raise NotFoundError(
        Text("schema.unknown", "unknown key {key:quote}", key=key), hint=did_you_mean(near) if near else None
    )
