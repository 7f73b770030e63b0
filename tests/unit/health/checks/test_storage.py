"""Checks of disks and paths: full ones, checkpoints on a node's own disk, outputs that are not fetched."""

from dataclasses import replace

import pytest

from ascendrun.core.findings import Severity
from ascendrun.health.survey.facts import Disk, WriteResult
from tests.lib.host_worlds import GIB, JOB, NAMES, found, sound, world


def test_two_paths_on_a_full_disk_are_one_fault_though_its_free_space_changes():
    first, second = (Disk(path, free, 900 * GIB, 5, 10, "ext4", False, 259) for path, free in (("/a", 0), ("/b", 4096)))
    other = replace(first, at="/c", device=260)
    (one,) = found(world(sound("n2", disks={"/a": first, "/b": second})), "disk-full")
    assert one.values == {"path": "/a", "free": 0}
    assert len(found(world(sound("n2", disks={"/a": first, "/b": second, "/c": other})), "disk-full")) == 2


def test_a_directory_that_takes_no_file_is_not_said_to_be_full():
    disks = {"/proc/ckpt": Disk("/proc", 0, 0, 0, 0, "proc", False, 22)}
    writes = {"/proc/ckpt": WriteResult("/proc", "cannot write in /proc", "bad-directory", is_late=False)}
    assert not found(world(sound("n2", disks=disks, writes=writes)), "disk-full")
    (one,) = found(world(sound("n2", disks=disks, writes=writes)), "directory-not-writable")
    assert one.values["path"] == "/proc/ckpt"
    full = {"/proc/ckpt": replace(writes["/proc/ckpt"], code="disk-full")}
    assert found(world(sound("n2", disks=disks, writes=full)), "disk-full")


def test_checkpoints_on_the_nodes_own_disks_are_told_to_jobs_that_restart():
    def on(kind, is_remote, restarts=3, hosts=NAMES, **more):
        disks = {"/ckpt": Disk("/ckpt", 900 * GIB, 1000 * GIB, 10**8, 10**8, kind, is_remote)}
        job = f"{JOB % 'cpu'}checkpoint: {{dir: /ckpt}}\nrestart: {{max_restarts: {restarts}}}\n"
        return found(world(*(sound(host, disks=disks, **more) for host in hosts), job=job), "checkpoints-local")

    (local,) = on("xfs", False)
    assert (local.severity, local.hosts) == (Severity.WARN, tuple(NAMES))
    assert local.values == {"path": "/ckpt", "kind": ("xfs",)}
    assert on("xfs", False, hosts=NAMES[:1])[0].hosts == tuple(NAMES[:1])
    assert not on("nfs4", True) and not on(None, None) and not on("xfs", False, restarts=0)
    assert not on("ext4", False, is_local=True)


@pytest.mark.parametrize(
    ("words", "more", "found_path"),
    [
        (["--output_dir", "out"], "", "out"),
        (["--output-dir=runs/a"], "", "runs/a"),
        (["--save", "ckpt"], "", "ckpt"),
        (["--output_dir", "out/a"], "outputs: [out/]", None),
        (["--output_dir", "/ckpt/a"], "", None),
        (["--output_dir", "$HOME/a"], "", None),
        (["--save_steps", "100"], "", None),
        (["--save", "--lr", "1"], "", None),
        (["--save", "100"], "", None),
        (["--output", "true"], "", None),
    ],
)
def test_a_relative_output_is_named_unless_it_is_fetched(words, more, found_path):
    job = (JOB % "cpu").replace("command: [", f"command: [python, train.py, {', '.join(words)}, ", 1) + more
    facts = found(world(*map(sound, NAMES), job=job), "output-relative")
    assert [one.values["path"] for one in facts] == ([found_path] if found_path else [])
    assert all((one.severity, one.hosts) == (Severity.WARN, tuple(NAMES)) for one in facts)


@pytest.mark.parametrize(
    ("name", "text", "more", "expected"),
    [
        ("train.yaml", "output_dir: saves/a\nmax_steps: 5\n", "", [("train.yaml: output_dir", "saves/a")]),
        ("train.json", '{"output_dir": "saves/a"}', "", [("train.json: output_dir", "saves/a")]),
        ("train.yaml", "output_dir: saves/a\n", "outputs: [saves/]", []),
        ("train.yaml", "output_dir: /ckpt/a\nsave_steps: 100\noverwrite_output_dir: true\n", "", []),
        ("train.yaml", "output_dir: [saves\n", "", []),
        ("train.yaml", "- saves/a\n", "", []),
        ("absent.yaml", None, "", []),
    ],
)
def test_a_relative_output_in_a_configuration_is_named(tmp_path, name, text, more, expected):
    if text is not None:
        (tmp_path / name).write_text(text)
    job = (JOB % "cpu").replace("command: [", f"command: [llamafactory-cli, train, {name}, ", 1) + more
    facts = found(world(*map(sound, NAMES), job=f"{job}\nworkdir: {{path: {tmp_path}}}\n"), "output-relative")
    assert [(one.values["option"], one.values["path"]) for one in facts] == expected
