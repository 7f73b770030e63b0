"""verify: what ascendrun reads of the tools of an NPU cluster, and which of its claims hold there."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascendrun.cli.context import CliContext, report_unreached
from ascendrun.cli.options import Target, cli_command, output_option, target_options
from ascendrun.cli.output import Column, format_table, print_record, sanitise_line
from ascendrun.text import Text, enumerate_texts
from ascendrun.text.format import fold_hosts, grouped

if TYPE_CHECKING:
    from ascendrun.health.verify import VerifyReport


@cli_command("verify")
@target_options
@click.option("--devices/--no-devices", default=None, help="Use all devices for about two minutes.  [default: ask]")
@click.option("--device-type", type=click.Choice(["npu", "cuda", "cpu"]), default="npu", show_default=True,
              help="Device type of the hosts.")  # fmt: skip
@click.option("-O", "--output-file", "path", metavar="FILE.tar.gz", default="ascendrun-verify.tar.gz",
              show_default=True, help="Write the outputs of all tools there, without credentials.")  # fmt: skip
@output_option
def command(
    ctx: CliContext, target: Target, devices: bool | None, device_type: str, path: str, output: str | None
) -> int:
    """Compare what ascendrun knows of NPUs with a real cluster.

    Every probe and parser runs on the hosts, read-only. With --devices two small jobs use all devices; one is killed.
    Exit code 0: everything was read and no claim failed; 3: something was not; 5, 6: all or some hosts are unreachable.

    Examples:
    ascendrun verify -H cluster.hosts                         # read-only; asks before it uses a device
    ascendrun verify jobs/finetune.yaml --devices             # measure, with the setup and Python of this job
    ascendrun verify -H cluster.hosts --no-devices -O site.tar.gz -o json
    """
    hosts = target.hosts(ctx)
    if devices is None:
        question = Text(
            "verify.question", "Use all devices of {count:plural host hosts} for 2 minutes?", count=len(hosts)
        )
        devices = sys.stdin.isatty() and click.confirm(str(question), err=True)
    try:
        report = ctx.cluster.checks.verify(
            hosts,
            job_file=target.file,
            overrides=target.overrides,
            device_type=device_type,
            uses_devices=devices,
            archive=Path(path),
            progress=ctx.screen.progress,
        )
    finally:
        ctx.screen.close()
    if not print_record(report, output):
        print_report(report)
    return report_unreached(ctx, report.unreached.values(), len(report.hosts)) or (0 if report.is_passed else 3)


def print_report(report: VerifyReport) -> None:
    from ascendrun.health.verify import CLAIMS, Outcome

    counts = Counter((one.kind, one.outcome) for one in report.readings)
    kinds = list(dict.fromkeys(one.kind for one in report.readings))
    columns = [Column("KIND", lambda kind: kind)]
    columns += [
        Column(outcome.name, lambda kind, outcome=outcome: str(counts[kind, outcome] or "-"))  # type: ignore[misc]
        for outcome in Outcome
    ]
    sys.stdout.write(format_table(kinds, columns))
    odd = grouped(
        ((one.outcome, one.kind if one.kind != "probe" else one.label, one.lines[:1]), one)
        for one in report.readings
        if one.outcome is not Outcome.READ
    )
    for (outcome, what, lines), found in odd.items():
        shown = "".join(f" | {sanitise_line(line)[:100]}" for line in lines)
        print(f"{outcome.value:<11} {fold_hosts([one.host for one in found])}: {what} ({len(found)}){shown}")
    for claim in report.claims:
        values = enumerate_texts(f"{name} {value}" for name, value in claim.values.items())
        print(f"{claim.outcome.value:<11} {CLAIMS[claim.name]}: {sanitise_line(str(claim.why or values))}")
    if report.archive is not None:
        print(Text("verify.written", "outputs without credentials: {path}; attach it to an issue", path=report.archive))
