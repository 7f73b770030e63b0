"""`true` on every host given, at once, by asyncssh with what root's ~/.ssh says: python asyncssh_fan.py HOST...

The key and the known hosts are read once and the options are made once, as its documentation shows for many hosts.
"""

from __future__ import annotations

import asyncio
import os
import sys

import asyncssh


async def ask(host: str, options: asyncssh.SSHClientConnectionOptions) -> int:
    async with asyncssh.connect(host, options=options) as connection:
        done = await connection.run("true")
        return 255 if done.exit_status is None else done.exit_status


async def ask_all(hosts: list[str]) -> int:
    folder = os.path.expanduser("~/.ssh")
    options = asyncssh.SSHClientConnectionOptions(
        config=None,
        agent_path=None,
        username="root",
        client_keys=[asyncssh.read_private_key(f"{folder}/id_ed25519")],
        known_hosts=asyncssh.read_known_hosts(f"{folder}/known_hosts"),
        connect_timeout=120,
        login_timeout=120,
    )
    return max(await asyncio.gather(*(ask(host, options) for host in hosts)))


if __name__ == "__main__":
    sys.exit(asyncio.run(ask_all(sys.argv[1:])))
