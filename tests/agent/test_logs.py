"""Every byte of every log, once: floods, binaries, rotation, cut files, agents that die in between."""

import glob
import hashlib
import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

from ascendrun.node import layout, wire
from tests.agent.conftest import HOLD, PY, TAG, program
from tests.lib.vcluster.processes import await_that


def test_a_flood_of_200_mb_arrives_byte_for_byte_and_the_agent_answers_meanwhile(node, agent):
    code = (
        "import sys,hashlib\nh=hashlib.sha256()\n"
        "line=b''.join(b'%d some words of a log line\\n'%n for n in range(4000))\n"
        "n=0\nwhile n<200<<20:\n    sys.stdout.buffer.write(line); h.update(line); n+=len(line)\n"
        "sys.stdout.flush(); sys.stderr.write(h.hexdigest())"
    )
    agent.start(node.job(TAG, program(code), rotate_bytes=64 << 20))
    agent.wait(lambda: sum(len(f) for k, f in agent.files.items() if k[1] == "rank-0.out") > 20 << 20)
    asked = time.monotonic()
    agent.do("ping")
    assert time.monotonic() - asked < 10
    agent.wait_ended(TAG, 120)
    digest = agent.wait(lambda: agent.output(TAG, 0, "err") if len(agent.output(TAG, 0, "err")) == 64 else None, 60)
    agent.wait(lambda: sum(len(f) for k, f in agent.files.items() if k[1] == "rank-0.out") >= 200 << 20, 120)
    parts = sorted((key[2], bytes(data)) for key, data in agent.files.items() if key[1] == "rank-0.out")
    assert hashlib.sha256(b"".join(data for _, data in parts)).hexdigest().encode() == digest
    assert len(parts) >= 3 and all(data.endswith(b"\n") for _, data in parts)
    assert all(len(data) <= 64 << 20 for _, data in parts)
    assert all((node.folder(TAG) / ("rank-0.out.%d" % n)).read_bytes() == data for n, data in parts)


def test_binary_bytes_bare_returns_and_a_last_line_without_end_are_kept_when_the_rank_is_killed(node, agent):
    data = bytes(range(256)) * 3 + b"\r 10%\r 20%\n\xff\xfe\x00 last words without an end"
    ended = agent.run(node.job(TAG, program(f"import os\nos.write(1,{data!r})\nos.kill(os.getpid(),9)")))
    assert ended["codes"] == {"0": -9}
    agent.wait(lambda: agent.output(TAG) == data)


def test_every_chunk_has_its_arrival_time(node, agent, tmp_path):
    before = time.time_ns()
    code = (
        "import os, time\nfor n in range(3):\n    print(n, flush=True)\n"
        "    while not os.path.exists('go%d' % n): time.sleep(0.01)"
    )
    agent.start(node.job(TAG, program(code)))
    for n, output in enumerate((b"0\n", b"0\n1\n", b"0\n1\n2\n")):
        agent.wait(lambda output=output: agent.output(TAG) == output)
        (node.work("head-job") / ("go%d" % n)).touch()
    agent.wait_ended(TAG)
    agent.wait(lambda: len(agent.files.get((TAG, "rank-0.out.times", 0), b"")) >= 16)
    records = list(struct.iter_unpack("!QQ", bytes(agent.files[(TAG, "rank-0.out.times", 0)])))
    ends, times = zip(*records)
    assert {2, 4, 6} <= set(ends) and list(ends) == sorted(ends)
    times = list(times)
    assert times == sorted(times) and before < times[0] and times[-1] < time.time_ns()


def test_a_line_longer_than_a_generation_is_cut_and_loses_nothing(node, agent):
    agent.run(node.job(TAG, program("import sys\nsys.stdout.write('x'*3000000)"), rotate_bytes=1 << 20))
    agent.wait(lambda: len(agent.output(TAG)) == 3000000)
    assert max(key[2] for key in agent.files if key[1] == "rank-0.out") == 1


def test_an_agent_killed_in_mid_run_changes_nothing_and_the_next_one_goes_on_at_the_byte(node):
    first = node.connect()
    count = "import time\nfor n in range(3000):\n    print('line',n,flush=True)\n    if n%100==0: time.sleep(0.02)"
    first.start(node.job(TAG, program(count), program(count)))
    first.wait(lambda: len(first.output(TAG)) > 2000)
    first.kill()
    second = node.connect()
    second.files = first.files
    offsets = {}
    for (_, file, generation), data in first.files.items():
        offsets.setdefault(file, {})[str(generation)] = len(data)
    second.do("follow", tag=TAG, offsets=offsets)
    assert second.wait_ended(TAG)["codes"] == {"0": 0, "1": 0}
    wanted = b"".join(b"line %d\n" % n for n in range(3000))
    second.wait(lambda: second.output(TAG, 0) == wanted and second.output(TAG, 1) == wanted)
    for (_, file, generation), data in second.files.items():
        assert (node.folder(TAG) / ("%s.%d" % (file, generation))).read_bytes() == bytes(data)


def test_a_file_that_a_user_truncates_is_told_and_goes_on_in_the_next_generation(node, agent):
    code = (
        "import os,time\nos.write(1,b'a'*100)\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "os.write(1,b'after\\n')"
    )
    agent.start(node.job(TAG, program(code)))
    agent.wait(lambda: agent.output(TAG) == b"a" * 100)
    os.truncate(node.folder(TAG) / "rank-0.out.0", 10)
    told = agent.wait(lambda: [e for e in agent.events if e["event"] == "truncated"])[0]
    assert (told["file"], told["generation"], told["size"]) == ("rank-0.out", 0, 10)
    (node.work("head-job") / "go").touch()
    agent.wait_ended(TAG)
    agent.wait(lambda: agent.output(TAG) == b"a" * 100 + b"after\n")
    assert agent.told(TAG, "log_cut", rank=0, stream="out", generation=0, had=100)


def test_metrics_and_error_files_are_followed_too(node, agent):
    code = (
        "import os\nopen(os.environ['ASCENDRUN_METRICS_FILE'],'a').write('{\"step\": 1}\\n')\n"
        "open(os.environ['TORCHELASTIC_ERROR_FILE'],'w').write('{}')"
    )
    agent.run(node.job(TAG, program(code)))
    agent.wait(
        lambda: (
            agent.files.get((TAG, "rank-0.metrics", 0)) == b'{"step": 1}\n'
            and agent.files.get((TAG, "rank-0.error", 0)) == b"{}"
        )
    )


def test_a_reader_who_stops_reading_costs_no_memory_and_loses_nothing(node, agent):
    code = "import sys\nfor _ in range(60): sys.stdout.write(('y'*1023+'\\n')*1024)"
    agent.start(node.job(TAG, program(code)))
    await_that((node.folder(TAG) / "ended.json").exists)  # nobody reads: only the node's own file can be watched
    rss_kb = int(next(line.split()[1] for line in open("/proc/%d/status" % agent.process.pid) if "VmHWM" in line))
    assert rss_kb < 80 << 10
    agent.wait(lambda: len(agent.files.get((TAG, "rank-0.out", 0), b"")) == 60 << 20, 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_full_disk_costs_log_bytes_that_are_counted_but_no_record(node, tmp_path):
    runs = Path(layout.runs_dir(str(node.root)))
    runs.mkdir(mode=0o700, parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(runs)], check=True)
    try:
        agent = node.connect()
        code = "import sys\nfor _ in range(80): sys.stdout.write(('z'*1023+'\\n')*1024)\nsys.exit(3)"
        agent.start(node.job(TAG, program(code)))
        assert agent.wait_ended(TAG, 60)["codes"] == {"0": 3}
        dropped = sum(e["bytes"] for e in agent.told(TAG, "log_dropped"))
        agent.wait(lambda: len(agent.files.get((TAG, "rank-0.out", 0), b"")) + dropped == 80 << 20)
        assert dropped > 0 and "ENOSPC" in agent.told(TAG, "log_dropped")[0]["reason"]
        agent.wait_phase(TAG, "ended")
        assert agent.refused("prepare", **node.job("head-job.2", HOLD))["code"] == "disk-full"
        agent.close()
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
@pytest.mark.parametrize(
    "lacks, code, why",
    [("inodes", "disk-full", "No space left on device"), ("write access", "bad-directory", "Read-only file system")],
)
def test_a_disk_without_inodes_or_mounted_read_only_is_named_before_the_start(node, agent, lacks, code, why):
    runs = Path(layout.runs_dir(str(node.root)))
    runs.mkdir(mode=0o700, parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,nr_inodes=64,mode=700", "tmpfs", str(runs)], check=True)
    try:
        if lacks == "inodes":
            with pytest.raises(OSError, match="No space"):
                for number in range(64):
                    (runs / str(number)).touch()
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(runs)], check=True)
        error = agent.refused("prepare", **node.job(TAG, HOLD))
        values = error["message"]["values"]
        assert (error["code"], values["error"]) == (code, why) and values["doing"]["values"]["path"] == str(node.root)
    finally:
        subprocess.run(["umount", "-l", str(runs)], check=True)
    agent.run(node.job(TAG, ["true"]))


def test_every_python_searches_gathers_and_gives_up_closed_logs(node, python):
    agent = node.connect(python=python)
    code = "import sys\nfor n in range(30000): print('line %d of the log' % n)\nsys.stderr.write('ValueError: no\\n')"
    agent.run(node.job(TAG, [PY, "-c", code], rotate_bytes=200000))
    files = {"rank-0.out": [0, 0], "rank-0.err": [0, 0]}
    reply, body = agent.ask("grep", tag=TAG, files=files, patterns=["line 2999[0-9] ", "Error"])
    frames = wire.FrameReader().feed(body)
    assert reply["ok"] and reply["complete"] and frames[-1][0] == {"end": True, "truncated": False}
    assert [text for _, text in frames[:-1]] == [b"ValueError: no", *(b"line 2999%d of the log" % n for n in range(10))]

    item = {"name": "records", "kind": "glob", "bases": ["$ASCENDRUN_ATTEMPT_DIR"], "patterns": ["prepared.json"]}
    gathered = agent.do("gather", tag=TAG, items=[item], timeout_s=20)
    assert [one["file"] for one in gathered["files"]] == ["prepared.json"] and gathered["problems"] == []
    assert [(one["name"], one["offset"]) for one in agent.events if one["event"] == "gathered"] == [("records", 0)]

    there = len(glob.glob(str(node.folder(TAG) / "rank-0.out.[0-9]*")))
    have = {file: {str(one): 1 << 30 for one in range(there - 1)} for file in ("rank-0.out", "rank-0.out.times")}
    freed = agent.do("release", tag=TAG, have=have, keep_bytes=250000)
    assert there >= 3 and freed["freed_bytes"] > 0 and freed["kept_bytes"] <= 250000
    assert (node.folder(TAG) / ("rank-0.out.%d" % (there - 1))).exists()
