"""dashboard: serve pages of jobs and nodes to browsers until ^C."""

from __future__ import annotations

import gc
import os
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascendrun.cli import options
from ascendrun.cli.context import CliContext
from ascendrun.cli.listening import LOOPBACK, is_loopback, listen
from ascendrun.core.errors import PreflightError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.dashboard.gate import Access

PATH = click.Path(dir_okay=False, path_type=Path)
ENDING_S = 3
"""Seconds that open streams have at the end."""


@options.cli_command("dashboard")
@options.hostfile_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to serve on.  [default: a free one]")
@click.option("--bind", metavar="ADDRESS", default=LOOPBACK, help=f"Address to serve on.  [default: {LOOPBACK}]")
@click.option("--tls-cert", type=PATH, metavar="FILE", help="Certificate, with its chain, in PEM form.")
@click.option("--tls-key", type=PATH, metavar="FILE", help="Private key of the certificate.")
@click.option("--insecure", is_flag=True, help="Serve on another address without TLS.")
@click.option("--allow-actions", is_flag=True, help="Pages may submit, stop, retry and hold jobs, and drain hosts.")
@click.option("--no-browser", is_flag=True, help="Print the address only.")
def command(
    ctx: CliContext,
    hostfile: str | None,
    port: int,
    bind: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    allow_actions: bool,
    no_browser: bool,
) -> int:
    """Serve jobs, nodes and the queue to a browser, live, until ^C. Nothing can be changed there without
    --allow-actions.

    The address that is printed has a token: who has it can read the dashboard. Only this machine can connect, unless
    --bind is given. From another machine, use the printed ssh command.

    Examples:
    ascendrun dashboard
    ascendrun dashboard --no-browser --port 8765          # on a remote machine; prints the ssh command
    ascendrun dashboard -H cluster.hosts                  # also nodes without a job
    ascendrun dashboard --allow-actions                   # also submit and stop jobs there
    ascendrun dashboard --bind 10.0.0.2 --tls-cert cert.pem --tls-key key.pem
    """
    _check(bind, tls_cert, tls_key, insecure)
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        missing = Text("dashboard.no-web", "the dashboard requires {name}", name=error.name)
        raise PreflightError(missing, hint="pip install 'ascendrun[web]'") from None
    from ascendrun.cli.dashboard.app import make_app
    from ascendrun.cli.dashboard.gate import Gate

    has_file = hostfile is not None or ctx.settings.hostfile is not None
    hosts = options.hosts_of(ctx, hostfile=hostfile) if has_file else ()
    listening = listen(bind, port, instead="--port 0")
    port = listening.getsockname()[1]
    access = replace(_access(ctx, bind, port, is_tls=tls_cert is not None), allows_actions=allow_actions)
    config: dict[str, Any] = {"ssl_certfile": tls_cert, "ssl_keyfile": tls_key} if tls_cert else {}
    token = access.token if allow_actions else None
    gate = Gate(make_app(ctx.cluster, hosts, is_ending=lambda: server.should_exit, actions_token=token), access)
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    gc.set_threshold(50_000, 20, 20)  # a view of 1000 nodes makes many objects that live until the next one
    server = uvicorn.Server(uvicorn.Config(gate, timeout_graceful_shutdown=ENDING_S, **quiet, **config))
    _announce(ctx, access, bind, opens=not no_browser)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    return 0


def _check(bind: str, cert: Path | None, key: Path | None, insecure: bool) -> None:
    """Raise UsageError where the address would be served with less protection than the flags state."""
    if (cert is None) != (key is None):
        raise options.UsageError.of(
            "dashboard.tls-pair", "--tls-cert requires --tls-key, and --tls-key requires --tls-cert", "set both"
        )
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise options.UsageError(Text("dashboard.no-file", "{path}: file not found", path=str(path)))
    if not is_loopback(bind) and cert is None and not insecure:
        raise options.UsageError.of(
            "dashboard.needs-tls",
            "--bind {address}: without TLS the network can read the token, and with it jobs, logs and outputs",
            "set --tls-cert and --tls-key, or accept this with --insecure",
            address=bind,
        )


def _access(ctx: CliContext, bind: str, port: int, *, is_tls: bool) -> Access:
    from ascendrun.cli.dashboard.gate import Access

    names = {socket.gethostname(), socket.getfqdn()} if not is_loopback(bind) else set()
    return Access(
        token=secrets.token_urlsafe(32),
        port=port,
        hosts=frozenset(name.lower() for name in {*names, f"[{bind}]" if ":" in bind else bind}),
        any_address=bind in ("0.0.0.0", "::"),
        is_tls=is_tls,
        lang=ctx.settings.lang,
    )


def _announce(ctx: CliContext, access: Access, bind: str, *, opens: bool) -> None:
    """Print the address to stdout, and how a remote reader gets there; open a browser."""
    name = socket.getfqdn() if access.any_address else f"[{bind}]" if ":" in bind else bind
    scheme = "https" if access.is_tls else "http"
    url = f"{scheme}://{name}:{access.port}/?token={access.token}"
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
    is_remote = bool(ctx.environ.get("SSH_CONNECTION"))
    if is_remote and is_loopback(bind):
        server = ctx.environ["SSH_CONNECTION"].split()[2:3] or [socket.getfqdn()]
        user = ctx.environ.get("USER") or str(os.getuid())
        forward = f"ssh -N -L {access.port}:{LOOPBACK}:{access.port} {user}@{server[0]}"
        ctx.say("dashboard.forward", "on your machine, first run: {command}", command=forward)
    if not is_loopback(bind) and not access.is_tls:
        ctx.warn(Text("dashboard.exposed", "the network can read the token, and with it jobs, logs and outputs"))
    ctx.say("dashboard.serving", "^C stops")
    if opens and not is_remote:
        import webbrowser

        webbrowser.open(url)
