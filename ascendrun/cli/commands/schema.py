"""schema: the JSON Schema of job files."""

from __future__ import annotations

import json

import click

from ascendrun.cli.options import cli_command


@cli_command(
    "schema",
    examples="""
    ascendrun schema > job.schema.json      # then, in a job file: # yaml-language-server: $schema=job.schema.json
    ascendrun schema | jq '.properties | keys'
""",
)
def command() -> int:
    """Print the JSON Schema of job files, for completion and checks in editors."""
    from ascendrun.core.jobfile.spec import job_json_schema

    click.echo(json.dumps(job_json_schema(), indent=2, ensure_ascii=False))
    return 0
