"""bundle: a support archive of a job without credentials."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli.command import UsageError, exclusive
from ascendrun.cli.options import cli_command
from ascendrun.cli.output import Column, describe_memory, format_table
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import Bundle

LISTED_LEFT_OUT = 30


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic in newer click only
    """A size: 100M, 2G, 500K or plain bytes, as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", str(value).strip(), re.I)
        if not found:
            text = Text("cli.bad-size", "expected a size such as 500K, 100M or 2G, got {value:quote}", value=value)
            self.fail(str(text), param, ctx)
        return int(float(found.group(1)) * 1024 ** " KMG".index(found.group(2).upper() or " "))


@cli_command(
    "bundle",
    examples="""
    ascendrun bundle j-0007                        # ascendrun-j-0007.tar.gz
    ascendrun bundle j-0007 --dry-run              # list the contents; write nothing
    ascendrun bundle j-0007 -O /tmp/for-support.tar.gz --max-size 20M --no-logs
    ascendrun bundle j-0007 --layout ascend-fd     # input of Huawei's `ascend-fd parse`
""",
)
@click.argument("job")
@click.option(
    "-O", "--output-file", "path", metavar="FILE.tar.gz", help="Write this file.  [default: LAYOUT-JOB.tar.gz]"
)
@click.option(
    "--layout",
    type=click.Choice(["ascendrun", "ascend-fd"]),
    default="ascendrun",
    show_default=True,
    help="Choose the layout of the archive.",
)
@click.option("--no-logs", is_flag=True, help="Omit the output of the ranks.")
@click.option(
    "--max-size",
    type=Size(),
    default="100M",
    show_default=True,
    metavar="SIZE",
    help="Limit the size before compression; the middle of long files is removed.",
)
@click.option("--dry-run", is_flag=True, help="List the contents; write nothing.")
@click.pass_obj
def command(
    ctx: CliContext, job: str, path: str | None, layout: str, no_logs: bool, max_size: int, dry_run: bool
) -> int:
    """Pack the records of a job into one archive: state, events, logs, samples, diagnosis.

    Credentials are masked, by value and by form. MANIFEST.json in the archive lists the size of each file, whether it
    was truncated, and how many values were masked. Check the archive before you send it.
    """

    if no_logs and layout == "ascend-fd":
        raise UsageError(exclusive("--layout ascend-fd", "--no-logs"))
    bundle = ctx.cluster.diagnosis.bundle(
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
        ctx.say("bundle.skipped", "skipped: {what}: {why}", what=what, why=why)
    if len(contents.left_out) > LISTED_LEFT_OUT:
        more = len(contents.left_out) - LISTED_LEFT_OUT
        ctx.say("bundle.skipped-more", "skipped: {count} more, listed in MANIFEST.json", count=more)
    ctx.say(
        "bundle.summary",
        "{files:plural file files}, {size:bytes}; {secrets:plural secret secrets} masked in"
        " {places:plural place places}",
        files=len(contents.packed),
        size=sum(packed.bytes for packed in contents.packed),
        secrets=contents.secrets,
        places=sum(packed.redactions for packed in contents.packed),
    )
    if bundle.path is None:
        ctx.say("bundle.dry-run", "dry run: no file was written")
        return
    ctx.say(
        "bundle.written",
        "wrote {path} ({size:bytes}, sha256 {sha256})",
        path=str(bundle.path),
        size=bundle.archive_bytes,
        sha256=bundle.sha256,
    )
    ctx.hint(Text("bundle.check", "check the archive before you send it; some secrets may not be recognised"))
    for result in bundle.parsed:
        if result.code == 0:
            ctx.say("bundle.parsed", "ascend-fd parse succeeded on the logs of {node}", node=result.node)
        else:
            failed = Text(
                "bundle.parse-failed",
                "ascend-fd parse of the logs of {node}: {why}",
                node=result.node,
                why=result.output,
            )
            ctx.error(failed)
    if bundle.parsed_dir is not None:
        ctx.hint(f"ascend-fd diag -i {bundle.parsed_dir} -o REPORT_DIR")
