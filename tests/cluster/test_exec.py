"""`exec` on hosts of their own: two commands without an agent, later ones through it; all have the same answer."""

import json
from typing import Any

import pytest
from scenes import Scene, await_that, run_text

from tests.lib.vcluster.cluster import VirtualCluster

Ascendrun = Any


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster: VirtualCluster) -> Scene:
    scene = Scene(ascendrun, cluster)
    (scene.folder / "all.hosts").write_text(cluster.hostfile())
    return scene


def execute(scene: Scene, *argv: str, options: tuple[str, ...] = ()) -> Any:
    return scene.ascendrun("exec", "--hostfile", scene.folder / "all.hosts", *options, "--", *argv)


def agents(scene: Scene) -> int:
    return sum(
        any("serve" in word for word in one.argv)
        for host in scene.cluster.hosts
        for one in scene.cluster.processes(host)
    )


def answers(scene: Scene, *argv: str, options: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    done = execute(scene, *argv, options=("-o", "json", *options))
    return {one["host"]: one for one in json.loads(done.stdout)["results"]}


def test_a_host_that_is_down_is_told_beside_the_answers_of_the_others(scene: Scene) -> None:
    scene.cluster.sshd_stop("node2")
    done = execute(scene, "echo", "hello")
    assert done.returncode == 6, run_text(done)
    assert "hello" in done.stdout and "node2" in done.stdout + done.stderr


def test_a_command_that_takes_too_long_is_killed_on_the_node_cold_and_warm(scene: Scene) -> None:
    for count in (0, 2, 2):
        done = execute(scene, "sleep", "600", options=("--timeout", "5"))
        assert done.returncode == 6, run_text(done)
        await_that(
            lambda: (
                not any(
                    "sleep" in one.argv and "600" in one.argv
                    for host in scene.cluster.hosts
                    for one in scene.cluster.processes(host)
                )
            ),
            "no sleep is left",
        )
        await_that(lambda count=count: agents(scene) == count, "the second command has brought the agents")


def test_exit_codes_and_exact_output_are_the_same_cold_and_warm_and_equal_ones_shown_once(scene: Scene) -> None:
    code = "import sys; sys.stdout.write('a\\n'); sys.stderr.write(sys.argv[1]); sys.exit(3)"
    word = 'it\'s $(id) "quoted"\n\\end'
    cold = answers(scene, "python3", "-c", code, word)
    assert agents(scene) == 0
    again = answers(scene, "python3", "-c", code, word)
    await_that(lambda: agents(scene) == 2, "the agents are up")
    warm = answers(scene, "python3", "-c", code, word)
    for told in (cold, again, warm):
        assert {host: (one["exit_code"], one["stdout"], one["stderr"]) for host, one in told.items()} == {
            "node1": (3, "a\n", word),
            "node2": (3, "a\n", word),
        }
    shown = execute(scene, "echo", "same")
    assert shown.returncode == 0 and shown.stdout.count("same") == 1 and "node[1-2]" in shown.stdout, run_text(shown)
