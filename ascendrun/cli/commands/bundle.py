"""bundle: a support archive of a job, without credentials."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.options import cli_command

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.query.bundle_job import Bundle

LISTED_LEFT_OUT = 30


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer click only
    """100M, 2G, 500K or plain bytes, as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", str(value).strip(), re.I)
        if not found:
            self.fail(f"{value!r} is no size; write 500K, 100M or 2G", param, ctx)
        return int(float(found.group(1)) * 1024 ** " KMG".index(found.group(2).upper() or " "))


@cli_command(
    "bundle",
    examples="""
    ascendrun bundle j-0007                        # ascendrun-j-0007.tar.gz
    ascendrun bundle j-0007 --dry-run              # lists what would be in it; writes nothing
    ascendrun bundle j-0007 -o /tmp/for-support.tar.gz --max-size 20M --no-logs
    ascendrun bundle j-0007 --layout ascend-fd     # ascend-fd-j-0007.tar.gz: what Huawei's `ascend-fd parse` reads
""",
)
@click.argument("job")
@click.option("--output", "-o", "path", metavar="FILE.tar.gz", help="Where to.  [default: LAYOUT-JOB.tar.gz here]")
@click.option(
    "--layout",
    type=click.Choice(["ascendrun", "ascend-fd"]),
    default="ascendrun",
    show_default=True,
    help="Which folders.",
)
@click.option("--no-logs", is_flag=True, help="Without what the ranks printed.")
@click.option(
    "--max-size",
    type=Size(),
    default="100M",
    show_default=True,
    metavar="SIZE",
    help="Of all texts before compression; long files lose their middle.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be in it.")
@click.pass_obj
def command(
    ctx: CliContext, job: str, path: str | None, layout: str, no_logs: bool, max_size: int, dry_run: bool
) -> int:
    """Pack what is known of a job into one archive to hand on: records, story, logs, measurements, diagnosis.

    Credentials are taken out, by value and by form; MANIFEST.json in the archive and the list on the screen say of each
    file how long it was, whether it was cut, and how many marks stand in it. Look at it before you send it.
    """

    if no_logs and layout == "ascend-fd":
        raise click.UsageError("--layout ascend-fd is made of logs; leave --no-logs out")
    bundle = ctx.cluster.bundle(
        job,
        path=Path(path) if path else None,
        layout=layout,
        with_logs=not no_logs,
        max_bytes=max_size,
        is_dry=dry_run,
        environ=ctx.environ,
    )
    _print(ctx, bundle)
    return 0 if all(result.code == 0 for result in bundle.parsed) else 6


def _print(ctx: CliContext, bundle: Bundle) -> None:
    from ascendrun.cli.output import Column, describe_memory, format_table

    contents = bundle.contents
    sys.stdout.write(
        format_table(
            contents.packed,
            [
                Column("FILE", lambda one: one.name),
                Column("SIZE", lambda one: describe_memory(one.bytes)),
                Column("OF", lambda one: describe_memory(one.of_bytes) if one.is_cut else "-"),
                Column("REDACTED", lambda one: str(one.redactions) if one.redactions else "-"),
            ],
        )
    )
    sys.stdout.flush()
    for what, why in contents.left_out[:LISTED_LEFT_OUT]:
        ctx.echo(f"not in it: {what}: {why}")
    if len(contents.left_out) > LISTED_LEFT_OUT:
        ctx.echo(f"not in it: {len(contents.left_out) - LISTED_LEFT_OUT} more things; MANIFEST.json lists them")
    total = describe_memory(sum(one.bytes for one in contents.packed))
    marks = sum(one.redactions for one in contents.packed)
    ctx.echo(f"{len(contents.packed)} files, {total}; {contents.secrets} secrets, hidden in {marks} places")
    if bundle.path is None:
        ctx.echo("nothing was written: --dry-run")
        return
    ctx.echo(f"wrote {bundle.path} ({describe_memory(bundle.archive_bytes)}, sha256 {bundle.sha256})")
    ctx.echo("hint: look through it before you hand it on; no search finds every secret")
    for result in bundle.parsed:
        ctx.echo(f"ascend-fd parse, {result.node}: " + ("done" if result.code == 0 else f"failed: {result.says}"))
    if bundle.parsed_dir is not None:
        ctx.echo(f"hint: ascend-fd diag -i {bundle.parsed_dir} -o REPORT_DIR")
