"""A host's identity and accounts: the files that make one machine differ from the next."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.lib.vcluster import namespaces as ns
from tests.lib.vcluster.plan import Common, HostPlan

SSHD_CONFIG_PATH = "/etc/ssh/vcluster_sshd_config"
HOST_KEY_PATH = "/etc/ssh/vcluster_host_key"
SSHD_LOG_PATH = "/var/log/sshd.log"
SSHD_ARGV = ("/usr/sbin/sshd", "-E", SSHD_LOG_PATH, "-f", SSHD_CONFIG_PATH)
BOOT_ID_PATH = "/run/boot_id"
SSHD_PID_PATH = "/run/sshd.pid"
FIRST_USER_ID = 2000

RC_FILES = (".bashrc", ".bash_profile", ".profile", ".zshenv", ".zshrc", ".cshrc", ".tcshrc")
NOISY_RC = {"bash": ".bashrc", "zsh": ".zshenv", "fish": ".config/fish/config.fish", "csh": ".cshrc", "tcsh": ".cshrc"}


def sshd_config(options: Sequence[str]) -> str:
    """The whole configuration; `options` come first, since sshd takes the first value of a keyword."""
    ours = (
        "Port 22",
        f"HostKey {HOST_KEY_PATH}",
        f"PidFile {SSHD_PID_PATH}",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "UseDNS no",
        "Subsystem sftp internal-sftp",
    )
    return "\n".join((*options, *ours)) + "\n"


def start_run_folder(boot_id: str | None) -> None:
    """What each boot creates, with the host's tree as "/": a boot id, bound over the kernel's, and sshd's directory."""
    own = Path(BOOT_ID_PATH)
    own.write_text(f"{boot_id or uuid.uuid4()}\n")
    ns.bind(own, "/proc/sys/kernel/random/boot_id")
    os.makedirs("/run/sshd", mode=0o755)


def write_identity(host: HostPlan, common: Common) -> None:
    """Runs with the host's tree as "/"."""
    Path("/etc/hostname").write_text(f"{host.name}\n")
    _replace("/etc/machine-id", uuid.uuid5(uuid.NAMESPACE_DNS, host.name).hex + "\n")
    Path("/etc/hosts").write_text(common.etc_hosts)
    _write(HOST_KEY_PATH, host.host_key, 0o600)
    write_sshd_config(host)
    _write_ssh_folder(Path(common.home) / ".ssh", common)
    _quiet_rc_files(common.home)
    if host.shell:
        _edit("/etc/passwd", r"(?m)^(root:.*:)[^:\n]*$", rf"\g<1>{host.shell}")
    if host.noise is not None:
        _make_noisy(host, common.home)
    if host.python:
        _link_python(host.python)
    for number, (name, shell) in enumerate(common.users):
        _add_user(name, shell, FIRST_USER_ID + number, common)


def write_sshd_config(host: HostPlan) -> None:
    _write(SSHD_CONFIG_PATH, host.sshd_config, 0o644)


def _write_ssh_folder(folder: Path, common: Common) -> None:
    _write(folder / "authorized_keys", common.authorized_keys, 0o600)
    _write(folder / "id_ed25519", common.private_key, 0o600)
    _write(folder / "known_hosts", common.known_hosts, 0o600)


def _quiet_rc_files(home: str) -> None:
    """The machine's own rc files (a pyenv costs 0.4 s a command) are not a cluster host's."""
    for name in RC_FILES:
        path = Path(home) / name
        if path.exists() or path.is_symlink():
            path.unlink()
        if (Path("/etc/skel") / name).is_file():
            shutil.copyfile(Path("/etc/skel") / name, path)


def _make_noisy(host: HostPlan, home: str) -> None:
    shell = os.path.basename(host.shell or "bash")
    if shell not in NOISY_RC:
        raise ValueError(f"{host.name}: {shell} reads no rc file for a command over ssh, it cannot print noise")
    path = Path(home) / NOISY_RC[shell]
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    quoted = (host.noise or "").replace("'", "'\\''")
    path.write_text(f"echo '{quoted}'\n{before}")


def _link_python(python: str) -> None:
    link = Path("/usr/local/bin/python3")
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists() or link.is_symlink():
        link.unlink()
    link.symlink_to(python)


def _add_user(name: str, shell: str, uid: int, common: Common) -> None:
    home = Path("/home") / name
    (home / ".ssh").mkdir(parents=True, exist_ok=True)
    _append("/etc/passwd", f"{name}:x:{uid}:{uid}::{home}:{shell}\n")
    _append("/etc/shadow", f"{name}:*:19000:0:99999:7:::\n")
    _append("/etc/group", f"{name}:x:{uid}:\n")
    _write_ssh_folder(home / ".ssh", common)
    for path in (home, home / ".ssh", *(home / ".ssh").iterdir()):
        os.chown(path, uid, uid)
    home.chmod(0o700)
    (home / ".ssh").chmod(0o700)


def _replace(path: str, text: str) -> None:
    """Write a file that may be read-only or a link below."""
    if os.path.lexists(path):
        os.unlink(path)
    Path(path).write_text(text)


def _write(path: os.PathLike[str] | str, text: str, mode: int) -> None:
    Path(path).write_text(text)
    os.chmod(path, mode)


def _append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _edit(path: str, pattern: str, replacement: str) -> None:
    Path(path).write_text(re.sub(pattern, replacement, Path(path).read_text()))
