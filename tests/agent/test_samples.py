"""The sampler beside a supervisor: what it writes, what it never holds up, and that it is gone with its attempt."""

import base64
import json
import os
import signal
import zlib

from tests.agent.conftest import HOLD, TAG
from tests.agent.test_launched import LAUNCHER, launched

HANG = ["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 60; done"]


def tool(name, *argv, every_s=0.2, timeout_s=30.0):
    return {"name": name, "argv": list(argv), "every_s": every_s, "timeout_s": timeout_s}


def sampling(*items, every_s=0.2, **more):
    return {"every_s": every_s, "items": list(items), **more}


def lines_of(agent, tag=TAG):
    data = b"".join(bytes(agent.files[key]) for key in sorted(agent.files) if key[:2] == (tag, "samples"))
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def said(agent, name):
    return [line for line in lines_of(agent) if line.get("tool") == name]


def ranks_of(agent, number):
    return [rank for line in lines_of(agent) for rank in line.get("ranks", ()) if rank["rank"] == number]


def text_of(line):
    return line["text"] if "text" in line else zlib.decompress(base64.b64decode(line["z"])).decode()


def test_host_ranks_and_tools_are_told_while_the_ranks_run_on_every_python(node, python):
    agent = node.connect(python=python)
    busy = ["sh", "-c", "while :; do :; done"]
    job = node.job(
        TAG,
        busy,
        HOLD,
        sampling=sampling(tool("talk", "sh", "-c", "echo word; echo $0 $1", "a", "b c"), devices=[4, 6]),
    )
    for number, rank in enumerate(job["ranks"]):
        rank["env"]["LOCAL_RANK"] = str(number)
    agent.start(job)
    agent.wait(lambda: any(rank.get("cpu") for rank in ranks_of(agent, 0)) and said(agent, "talk"))
    agent.wait(lambda: any(line.get("host", {}).get("cpu") is not None for line in lines_of(agent)))
    newest = [rank[-1] for rank in (ranks_of(agent, 0), ranks_of(agent, 1))]
    pids = {rank: agent.wait_told(TAG, "rank_started", rank=rank)["pid"] for rank in (0, 1)}
    assert [(rank["pid"], rank["device"]) for rank in newest] == [(pids[0], 4), (pids[1], 6)]
    assert newest[1]["state"] == "S" and newest[1]["rss_bytes"] > 0 and newest[1]["threads"] == 1
    assert newest[1]["cpu"] < 1.0 and newest[1]["write_bytes_s"] == 0.0
    host = [line["host"] for line in lines_of(agent) if "host" in line][-1]
    assert 0 < host["memory_used_bytes"] < host["memory_total_bytes"] and host["disk_free_bytes"] > 0
    assert {"load1", "net_rx_bytes_s", "net_tx_bytes_s"} <= set(host)
    first = said(agent, "talk")[0]
    assert text_of(first) == "word\na b c\n" and first["code"] == 0 and first["at_ns"] > 0
    agent.end(TAG)
    assert node.alive(TAG) == []


def test_the_sampler_is_nothing_that_a_rank_left_behind(node, agent):
    ended = agent.run(node.job(TAG, ["sh", "-c", "exec sleep 0.3"], sampling=sampling(tool("hang", *HANG))))
    assert ended["codes"] == {"0": 0} and ended["leftovers"] == []
    assert not agent.told(TAG, "stopping"), "all ranks exited: nobody had to be ended"
    assert node.alive(TAG) == [], "and when the end is told, sampler and tools are gone"


def test_a_hanging_tool_holds_up_neither_the_figures_nor_the_other_tools(node, agent):
    agent.start(
        node.job(TAG, HOLD, sampling=sampling(tool("hang", *HANG, timeout_s=4.0), tool("well", "echo", "fine")))
    )
    hosts = lambda: [line for line in lines_of(agent) if "host" in line]  # noqa: E731
    agent.wait(lambda: len(said(agent, "well")) >= 2 and len(hosts()) >= 3)
    assert not said(agent, "hang"), "the others were asked while it hung"
    late = agent.wait(lambda: said(agent, "hang"))[0]
    assert late["timed_out"] and late["code"] is None
    count = len(said(agent, "well"))
    agent.wait(lambda: len(said(agent, "well")) > count)
    agent.end(TAG)
    assert node.alive(TAG) == []


def test_a_tool_that_talks_without_end_or_is_not_there_costs_a_line(node, agent):
    agent.start(
        node.job(
            TAG,
            HOLD,
            sampling=sampling(
                tool("flood", "sh", "-c", "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", every_s=60.0),
                tool("missing", "/no/such/tool", every_s=60.0),
                tool("leaves-a-child", "sh", "-c", "sleep 600 & echo done", every_s=60.0),
            ),
        )
    )
    agent.wait(lambda: said(agent, "flood") and said(agent, "missing") and said(agent, "leaves-a-child"))
    flood, missing, child = (said(agent, name)[0] for name in ("flood", "missing", "leaves-a-child"))
    assert flood["truncated"] and flood["code"] is None and len(text_of(flood)) == 1 << 20
    assert missing["code"] == 127
    assert text_of(child) == "done\n" and child["code"] == 0
    agent.end(TAG)
    assert node.alive(TAG) == []


def test_a_tool_that_fails_again_and_again_is_asked_more_and_more_rarely(node, agent):
    agent.start(node.job(TAG, HOLD, sampling=sampling(tool("bad", "false", every_s=0.1), tool("good", "true"))))
    agent.wait(lambda: len(said(agent, "good")) >= 15)
    assert 2 <= len(said(agent, "bad")) < len(said(agent, "good"))
    agent.end(TAG)


def test_a_supervisor_that_is_killed_takes_its_sampler_along(node, agent):
    agent.start(node.job(TAG, HOLD, sampling=sampling(tool("well", "echo", "fine"), tool("hang", *HANG))))
    agent.wait(lambda: said(agent, "well"))
    rank = agent.told(TAG, "rank_started")[0]["pid"]
    os.kill(node.identity(TAG)["pid"], signal.SIGKILL)
    agent.wait(lambda: node.alive(TAG) == [rank])
    assert agent.wait_told(TAG, "supervisor_lost")
    agent.end(TAG)
    assert node.alive(TAG) == []


def test_a_sampler_that_is_killed_harms_nobody(node, agent):
    agent.start(node.job(TAG, ["sh", "-c", "read line </dev/null; exec sleep 600"], sampling=sampling()))
    agent.wait(lambda: ranks_of(agent, 0))
    rank = agent.wait_told(TAG, "rank_started")["pid"]  # a file of its own, which may come after the samples
    samplers = [pid for pid in node.alive(TAG) if pid != rank]
    assert len(samplers) == 1
    assert agent.pids(TAG) == [rank], "it is none of the job's processes"
    os.kill(samplers[0], signal.SIGKILL)
    agent.wait(lambda: node.alive(TAG) == [rank])
    assert agent.phase(TAG) == "running"
    assert agent.end(TAG)["leftovers"] == []


def test_a_rank_that_calls_itself_the_sampler_is_ended_like_any_other(node, agent):
    hide = "ASCENDRUN_SAMPLER=1 setsid sleep 600 & sleep 0.2"
    agent.run(node.job(TAG, ["sh", "-c", hide], sampling=sampling()))
    assert node.alive(TAG) == []


def test_ranks_below_a_launcher_are_told_as_ranks_and_the_launcher_is_none(node, agent):
    start_two = "for n in 0 1; do RANK=$((n + 6)) LOCAL_RANK=$n sh -c 'sleep 600 & exec sleep 601' & done; wait"
    job = node.job(TAG, ["sh", "-c", start_two], sampling=sampling(devices=[2, 3]))
    env = job["ranks"][0]["env"]
    env.update(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", ASCENDRUN_FORKS="0 1 1")
    agent.start(job)
    agent.wait(lambda: ranks_of(agent, 6) and ranks_of(agent, 7))
    assert {rank["rank"] for line in lines_of(agent) for rank in line.get("ranks", ())} == {6, 7}
    agent.wait(lambda: ranks_of(agent, 7)[-1]["threads"] == 2)
    assert ranks_of(agent, 7)[-1]["device"] == 3
    agent.end(TAG)
    assert node.alive(TAG) == []


def test_ranks_that_their_launcher_starts_late_have_samples(node, agent, tmp_path):
    """torchrun imports torch for longer than a sampler needs to start."""
    job = launched(node, code="import time; time.sleep(600)", sampling=sampling(devices=[4, 6]))
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'late')!r}): time.sleep(0.02)\n"
    job["launcher"]["argv"][2] = wait + LAUNCHER
    agent.start(job)
    agent.wait(lambda: lines_of(agent))
    assert {len(line["ranks"]) for line in lines_of(agent) if "ranks" in line} == {0}
    (tmp_path / "late").touch()
    agent.wait(lambda: ranks_of(agent, 2) and ranks_of(agent, 3))
    assert ranks_of(agent, 3)[-1]["device"] == 6
    agent.end(TAG)


def test_without_the_wish_nothing_is_sampled(node, agent):
    for number, wish in enumerate((None, {}), start=1):
        tag = "head-job.%d" % number
        agent.run(node.job(tag, ["true"], sampling=wish))
        assert not (node.folder(tag) / "samples.0").exists()


def test_a_host_without_a_job_tells_how_it_is_within_the_deadline(node, agent):
    reply = agent.do(
        "sample",
        items=[tool("well", "echo", "fine"), tool("hang", *HANG, timeout_s=1.0), tool("missing", "/no/such/tool")],
        timeout_s=20,
    )
    lines = {line.get("tool"): line for line in reply["lines"]}
    assert lines[None]["host"]["memory_total_bytes"] > 0 and "cpu" in lines[None]["host"]
    assert text_of(lines["well"]) == "fine\n" and lines["well"]["code"] == 0
    assert lines["hang"]["timed_out"] and not lines["missing"]["timed_out"] and lines["missing"]["code"] is None
