"""Starting: on all nodes or on none, at most once, with exactly what was planned. Refusals first."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from ascendrun.node import layout, procs, tree_hash
from ascendrun.node.op_errors import message
from tests.agent.conftest import HOLD, PY, TAG
from tests.ports import free_port

SHOW = [PY, "-c", "import os,sys,json;print(json.dumps([sys.argv[1:],dict(os.environ)]))"]


# --- the supervisor that waits for GO ---


def ready(node):
    """The pids of the supervisors that were started in advance, by tag."""
    found = {}
    for pid in procs.snapshot():
        words = procs.read_cmdline(pid).split(b"\0")
        if words[-4:-2] == [b"warm", b"supervise"] and words[-2].startswith(os.fsencode(str(node.root))):
            found[layout.tag_of(os.fsdecode(words[-2]))] = pid
    return found


def test_a_supervisor_waits_for_go_and_ends_with_the_preparation_or_the_agent(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD))
    assert set(ready(node)) == {TAG}
    agent.do("abort", tag=TAG)
    agent.wait(lambda: not ready(node))
    agent.do("prepare", **node.job(TAG, HOLD))
    agent.do("prepare", **node.job("head-job.2", HOLD))
    assert set(ready(node)) == {"head-job.2"}, "one for each run"
    agent.do("stop", tag="head-job.2", now=True, grace_s=None)
    assert not ready(node)
    agent.do("prepare", **node.job("head-job.3", HOLD))
    agent.kill()
    node.connect().wait(lambda: not ready(node))


def test_go_uses_the_supervisor_that_waits_and_replaces_one_that_died(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD))
    waits = procs.identify(ready(node)[TAG])
    agent.do("follow", tag=TAG, offsets={})
    agent.do("go", tag=TAG, master_port=None)
    began = node.identity(TAG)
    assert os.getsid(began["pid"]) == waits["pid"], "the supervisor is in the session of the process that waited"
    assert not procs.is_alive(waits), "its first process is gone"
    agent.end(TAG)
    agent.do("prepare", **node.job("head-job.2", HOLD))
    os.kill(ready(node)["head-job.2"], signal.SIGKILL)
    agent.do("follow", tag="head-job.2", offsets={})
    agent.do("go", tag="head-job.2", master_port=None)
    assert agent.phase("head-job.2") == "running"
    agent.end("head-job.2")


# --- refusals ---


def test_a_taken_port_is_refused_and_named_and_the_next_free_one_is_taken(node, agent):
    free = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = agent.refused("prepare", **node.job(TAG, HOLD, ports=[port]))
        assert error["code"] == "port-taken" and error["message"] == message("ports-in-use", ports=[port])
        assert agent.do("prepare", **node.job(TAG, HOLD, ports=[port, free]))["master_port"] == free


def test_the_copy_of_the_job_is_next_to_its_preparation_and_private(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD, job={"id": "job", "schema": 1}))
    path = node.folder(TAG) / layout.JOB
    assert json.loads(path.read_text()) == {"id": "job", "schema": 1} and path.stat().st_mode & 0o077 == 0
    agent.do("abort", tag=TAG)
    assert not path.exists()


def test_a_reserved_port_is_kept_from_others_until_abort(node, agent):
    port = free_port()
    agent.do("prepare", **node.job(TAG, HOLD, ports=[port]))
    assert agent.refused("prepare", **node.job("head-other.1", HOLD, ports=[port]))["code"] == "port-taken"
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", port))
    assert agent.do("prepare", **node.job(TAG, HOLD, ports=[port]))["master_port"] == port
    agent.do("abort", tag=TAG)
    with socket.socket() as other:
        other.bind(("", port))
    assert agent.phase(TAG) is None


def test_a_missing_python_is_refused_with_what_was_tried(node, agent):
    error = agent.refused("prepare", **node.job(TAG, ["/opt/none/bin/python", "x.py"]))
    assert error == {"code": "python-missing", "message": message("command-missing", path="/opt/none/bin/python")}
    error = agent.refused("prepare", **node.job(TAG, ["no-such-python"]))
    assert error["code"] == "python-missing" and error["message"]["key"] == "command-not-in-path"
    assert not (node.folder(TAG) / "prepared.json").exists()


def test_a_tree_that_is_missing_or_was_tampered_with_is_refused_naming_the_file(node, agent, code):
    sha256 = agent.stage(code)
    assert agent.refused("prepare", **node.job(TAG, HOLD, trees=["0" * 64]))["code"] == "tree-missing"
    tree = Path(layout.tree_dir(str(node.root), sha256))
    for damage, named in (
        (lambda: rewrite(tree / "train.py", "print('evil')\n"), ("entry-changed", "train.py")),
        (lambda: (tree / "pkg" / "run.sh").unlink(), ("entry-missing", "pkg/run.sh")),
        (lambda: rewrite(tree / "extra.py", ""), ("entry-unexpected", "extra.py")),
    ):
        assert agent.stage(code) == sha256
        agent.do("prepare", **node.job(TAG, HOLD, trees=[sha256]))
        tree.chmod(0o755)
        (tree / "pkg").chmod(0o755)
        damage()
        error = agent.refused("prepare", **node.job(TAG, HOLD, trees=[sha256]))
        key, path = named
        assert error["code"] == "tree-differs"
        assert error["message"]["values"]["difference"] == message(key, path=path)
    assert agent.stage(code) == sha256
    agent.do("prepare", **node.job(TAG, HOLD, trees=[sha256]))


def rewrite(path, text):
    if path.exists():
        path.chmod(0o644)
    path.write_text(text)


def test_a_tree_whose_content_is_not_its_name_never_appears(node, agent, code):
    error = agent.stage(code, claim="ab" * 32)
    assert error["code"] == "tree-differs"
    assert os.listdir(node.root / "trees") == []
    assert agent.do("put_tree", tree="ab" * 32, size_bytes=9)["done"] is False


def test_folders_that_cannot_be_used_are_refused_by_name(node, agent, tmp_path):
    error = agent.refused("prepare", **node.job(TAG, HOLD, cwd=str(tmp_path / "none")))
    assert error["code"] == "bad-directory" and "none" in error["message"]["values"]["path"]
    job = node.job(TAG, HOLD)
    job["ranks"][0]["env"]["ASCENDRUN_CHECKPOINT_DIR"] = "/proc/1/none"
    error = agent.refused("prepare", **job)
    assert error["code"] == "bad-directory" and "/proc/1/none" in str(error["message"])


def test_an_older_a_started_and_a_stopped_attempt_are_stale(node, agent):
    agent.run(node.job("head-job.2", ["true"]))
    assert agent.refused("prepare", **node.job("head-job.2", HOLD))["code"] == "attempt-stale"
    assert agent.refused("prepare", **node.job("head-job.1", HOLD))["code"] == "attempt-stale"
    agent.do("forget", tag="head-job.2")
    assert not node.folder("head-job.2").exists()
    assert agent.refused("prepare", **node.job("head-job.1", HOLD))["code"] == "attempt-stale"
    agent.do("prepare", **node.job("head-job.3", HOLD))
    agent.do("prepare", **node.job("head-job.4", HOLD))
    assert agent.refused("go", tag="head-job.3", master_port=None)["code"] == "attempt-stale"


def test_a_new_attempt_waits_until_the_old_one_has_no_processes(node, agent):
    agent.start(node.job("head-job.1", HOLD))
    assert agent.refused("prepare", **node.job("head-job.2", HOLD))["code"] == "attempt-running"
    agent.end("head-job.1")
    agent.do("prepare", **node.job("head-job.2", HOLD))


def test_a_stop_that_comes_before_the_go_wins_for_ever_and_is_proved(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD))
    agent.do("stop", tag=TAG, now=True, grace_s=None)
    agent.do("follow", tag=TAG, offsets={})
    assert agent.wait_ended(TAG)["leftovers"] == []
    assert agent.refused("go", tag=TAG, master_port=None)["code"] == "attempt-stale"
    unheard = "head-unheard.7"
    agent.do("stop", tag=unheard, now=False, grace_s=1)
    agent.do("follow", tag=unheard, offsets={})
    agent.wait_ended(unheard)
    assert agent.refused("prepare", **node.job(unheard, HOLD))["code"] == "attempt-stale"
    agent.do("prepare", **node.job("head-unheard.8", HOLD))


def test_an_aborted_attempt_may_be_prepared_again_and_a_started_one_not_aborted(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD))
    agent.do("abort", tag=TAG)
    agent.do("abort", tag=TAG)
    assert agent.refused("go", tag=TAG, master_port=None)["code"] == "not-prepared"
    agent.start(node.job(TAG, HOLD))
    assert agent.refused("abort", tag=TAG)["code"] == "attempt-running"
    agent.end(TAG)


def test_a_command_that_cannot_be_executed_ends_the_attempt_with_127_and_says_why(node, agent, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert agent.run(node.job(TAG, HOLD, [str(broken)]))["codes"] == {"0": -15, "1": 127}
    failed = agent.told(TAG, "start_failed")[0]
    assert failed["rank"] == 1 and str(broken) == failed["message"]["values"]["path"]


@pytest.mark.parametrize(
    "setup, word",
    [
        ("echo no driver here >&2; false", "no driver here"),
        ("exit 4", "4"),
        ("source /no/such/set_env.sh", "set_env.sh"),
        ("if", "syntax error"),
    ],
)
def test_a_failing_setup_is_told_with_its_own_words(node, agent, setup, word):
    assert agent.run(node.job(TAG, ["true"], setup=setup))["codes"]["0"] != 0
    failed = agent.told(TAG, "start_failed")[0]
    assert word in str(failed["message"])


def test_a_command_missing_behind_the_setup_is_told_as_that(node, agent):
    assert agent.run(node.job(TAG, ["no-such-command"], setup="true"))["codes"] == {"0": 127}
    assert agent.told(TAG, "start_failed")[0]["message"] == message("no-command-after-setup", path="no-such-command")


# --- what was planned is what runs ---

ODD = [
    "",
    "-x",
    "a b",
    "a'; echo b",
    '"',
    "$(touch pwn)",
    "`id`",
    "\\",
    "new\nline",
    "\t",
    "*",
    "~",
    "!x",
    "ünï汉字\u202e",
    "\udcff\udcfe",
    "--port=\0MASTER_PORT\0",
    "x" * 100000,
]


@pytest.mark.parametrize("setup", [None, 'export FROM_SETUP="it\'s $((1+1))"; set -eu; : "$@"'])
def test_arguments_and_environment_arrive_byte_for_byte(node, agent, setup):
    job = node.job(TAG, [*SHOW, *ODD], setup=setup)
    job["ranks"][0]["env"].update(
        {"A'B": "odd name", "LANG": "C", "EMPTY": "", "MULTI": "a\nb='$(id)'", "R": "\u202e汉"}
    )
    if setup:
        del job["ranks"][0]["env"]["A'B"]  # bash drops names that are no identifiers
    agent.start(job, master_port=29555, secret_env={"TOKEN": "s3cret"})
    agent.wait_ended(TAG)
    agent.wait(lambda: agent.output(TAG).endswith(b"\n"))
    argv, env = json.loads(agent.output(TAG))
    assert argv == [arg.replace("\0MASTER_PORT\0", "29555") for arg in ODD]
    for name, value in job["ranks"][0]["env"].items():
        assert env[name] == value
    assert env["MASTER_PORT"] == "29555" and env["TOKEN"] == "s3cret" and env["ASCENDRUN_RUN_ID"] == TAG
    assert env.get("FROM_SETUP") == ("it's 2" if setup else None)
    assert not [name for name in env if name.startswith("__ascendrun") or name == "ASCENDRUN_FAILPOINT"]


def test_ranks_get_the_users_umask_while_our_files_are_private(node):
    old = os.umask(0o022)
    try:
        agent = node.connect()
    finally:
        os.umask(old)
    agent.run(node.job(TAG, ["sh", "-c", "umask; touch made; echo x >&2"]))
    assert agent.output(TAG) == b"0022\n"
    for folder, _, files in os.walk(node.root):
        assert os.stat(folder).st_mode & 0o077 == 0
        for name in files:
            if name not in ("made", node.agent.name):
                assert os.stat(os.path.join(folder, name)).st_mode & 0o177 == 0, name


def test_a_staged_tree_runs_as_it_was_and_shows_in_the_working_folder(node, agent, code):
    sha256 = agent.stage(code)
    assert agent.do("put_tree", tree=sha256, size_bytes=0)["done"] is True
    tree = Path(layout.tree_dir(str(node.root), sha256))
    assert tree_hash.tree_hash(str(tree)) == sha256
    assert tree.stat().st_mode & 0o777 == 0o555 and (tree / "train.py").stat().st_mode & 0o777 == 0o444
    work = Path(layout.work_dir(str(node.root), "head-job"))
    work.mkdir(parents=True)
    (work / "train.py").write_text("print('my own')\n")
    ready = agent.do("prepare", **node.job(TAG, [PY, "train.py"], ["./link"], trees=[sha256], link_tree=sha256))
    assert ready["kept"] == ["train.py"]
    agent.do("follow", tag=TAG, offsets={})
    agent.do("go", tag=TAG, master_port=None, secret_env={})
    agent.wait_ended(TAG)
    assert agent.output(TAG, 0) == b"my own\n" and agent.output(TAG, 1) == b"ran\n"


def test_a_newer_tree_replaces_the_older_ones_links(node, agent, code):
    first = agent.stage(code)
    agent.do("prepare", **node.job("head-job.1", HOLD, trees=[first], link_tree=first))
    (code / "train.py").unlink()
    (code / "new.py").write_text("")
    second = agent.stage(code)
    agent.do("prepare", **node.job("head-job.2", HOLD, trees=[second], link_tree=second))
    work = Path(layout.work_dir(str(node.root), "head-job"))
    assert sorted(os.listdir(work)) == sorted(os.listdir(code))
    assert (work / "new.py").resolve().parent.name == second


# --- at most once ---


def test_go_is_repeatable_and_starts_once(node, agent):
    agent.start(node.job(TAG, HOLD))
    first = agent.do("go", tag=TAG, master_port=None, secret_env={})
    assert first == {**agent.do("go", tag=TAG, master_port=None, secret_env={}), "re": first["re"]}
    agent.wait_told(TAG, "rank_started")
    assert len(agent.pids(TAG)) == 1
    agent.end(TAG)
    assert len(agent.told(TAG, "supervising")) == len(agent.told(TAG, "rank_started")) == 1


def test_go_by_several_agents_at_once_starts_once(node):
    agents = [node.connect() for _ in range(4)]
    agents[0].do("prepare", **node.job(TAG, HOLD))
    numbers = [a.post("go", tag=TAG, master_port=None, secret_env={}) for a in agents]
    replies = [a.wait(lambda a=a, n=n: a.replies.get(n))[0] for a, n in zip(agents, numbers)]
    assert all(reply["ok"] for reply in replies)
    assert len({reply["supervisor_pid"] for reply in replies}) == 1
    agents[0].do("follow", tag=TAG, offsets={})
    agents[0].wait_told(TAG, "rank_started", rank=0)
    assert len(agents[0].pids(TAG)) == 1
    agents[0].do("stop", tag=TAG, now=True, grace_s=None)
    agents[0].wait_ended(TAG)
    assert len(agents[0].told(TAG, "supervising")) == 1


def test_a_racing_stop_and_go_end_with_nobody_running(node):
    for n in range(5):
        tag = "head-race%d.1" % n
        one, two = node.connect(), node.connect()
        one.do("prepare", **node.job(tag, HOLD))
        number = one.post("go", tag=tag, master_port=None, secret_env={})
        two.do("stop", tag=tag, now=True, grace_s=None)
        one.wait(lambda one=one, number=number: one.replies.get(number))
        two.do("follow", tag=tag, offsets={})
        assert two.wait_ended(tag)["leftovers"] == []
        assert node.alive(tag) == []
        one.close()
        two.close()


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_between_the_claim_and_the_first_turn_of_the_supervisor_ends_the_attempt(node, now):
    """SIGUSR1, which announces the order and comes before SIGCONT, ended a supervisor that did not handle it yet."""
    one, two = node.connect(ASCENDRUN_FAILPOINT="launch.after_claim=pause"), node.connect()
    one.do("prepare", **node.job(TAG, HOLD))
    number = one.post("go", tag=TAG, master_port=None, secret_env={})
    identity = node.folder(TAG) / layout.IDENTITY
    one.wait(lambda: identity.exists() and json.loads(identity.read_text()).get("pid"))
    pid = json.loads(identity.read_text())["pid"]
    one.wait(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    two.do("follow", tag=TAG, offsets={})
    order = two.post("stop", tag=TAG, now=now, grace_s=None)
    assert two.wait(lambda: two.replies.get(order))[0]["ok"]
    assert two.wait_ended(TAG)["leftovers"] == [] and node.alive(TAG) == []
    assert one.wait(lambda: one.replies.get(number)), "go is answered too"


def test_the_agent_lives_under_a_path_with_spaces_and_quotes(tmp_path, node):
    odd = tmp_path / 'it\'s a "root" $HOME'
    shutil.copytree(node.root, odd)
    node.root, node.agent = odd, odd / node.agent.name
    agent = node.connect()
    agent.run(node.job(TAG, ["pwd"], setup="true"))
    assert agent.output(TAG).decode() == node.job(TAG)["cwd"] + "\n"


def test_a_command_is_found_on_the_path_of_the_login_behind_that_of_the_interpreter(node, agent):
    job = node.job(TAG, ["sh", "-c", "echo $PATH"])
    job["ranks"][0]["env"]["PATH"] = "/nowhere/bin:\0PATH\0"
    agent.start(job)
    agent.wait_ended(TAG)
    assert agent.output(TAG).startswith(b"/nowhere/bin:/")
