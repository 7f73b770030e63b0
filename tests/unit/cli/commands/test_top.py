"""top on a pseudo terminal: with keys, without textual, without colour; and who is left when it ends."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ascendrun.cli.commands.top import is_loopback, parse_listen
from ascendrun.cluster import Cluster
from ascendrun.cluster.samples import GRAFANA
from tests.lib.story_cluster import Run
from tests.lib.terminal import PseudoTerminal
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world

NOT_HERE = {"ascendrun_node_liveness", "ascendrun_device_ecc_errors", "ascendrun_job_epoch"}
"""Series that this world does not have."""
WITH = "import sys; from ascendrun.cli import main; sys.exit(main(sys.argv[1:]))"
WITHOUT = "import sys; sys.modules['textual'] = None; " + WITH[len("import sys; ") :]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state", busy=4, idle=3)
    with controller_lock(made.state_dir):
        yield made


class Terminal(PseudoTerminal):
    def __init__(self, world: TopWorld, code: str, *argv: str, **environ: str) -> None:
        left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "LC_ALL", "LANGUAGE")
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        super().__init__(
            ["-c", code, *argv],
            {
                **kept,
                "ASCENDRUN_STATE_DIR": str(world.state_dir),
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                "XDG_CONFIG_HOME": str(world.state_dir / "config"),
                **environ,
            },
            columns=80,
        )

    def wait_for(self, *words: str) -> str:
        self.wait_until(lambda: all(word in self.text for word in words))
        return self.text


@pytest.mark.slow
def test_on_a_terminal_it_has_keys_and_q_ends_it(world: TopWorld) -> None:
    with Terminal(world, WITH, "top") as terminal:
        terminal.wait_for("npu01", "qwen32b-lora", "Filter")
        terminal.child.send("u")
        terminal.wait_for("Alarm", "DOWN" if "LINK" in terminal.text else "npu03")
        terminal.child.send("q")
        assert terminal.end() == 0


@pytest.mark.slow
def test_ctrl_c_ends_it_too(world: TopWorld) -> None:
    with Terminal(world, WITHOUT, "top") as terminal:
        terminal.wait_for("npu01")
        terminal.child.sendintr()
        assert terminal.end() == 0
        assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")  # the screen that was there before is back


@pytest.mark.slow
def test_without_textual_a_plain_view_says_what_to_install_and_looks_again(world: TopWorld) -> None:
    with Terminal(world, WITHOUT, "top", "--interval", "0.1s") as terminal:
        seen = terminal.wait_for("npu01", "1040/5000", "pip install 'ascendrun[tui]'")
        assert len([line for line in seen.splitlines() if line.strip()]) <= 24
        world.write_metrics("j-0001", "npu01", 0, steps=70, step_s=1.5, own=1.0)
        terminal.wait_for("1070/5000")


@pytest.mark.parametrize("code", [WITH, WITHOUT])
@pytest.mark.slow
def test_without_colour_there_is_none(world: TopWorld, code: str) -> None:
    with Terminal(world, code, "top", "npu0*", NO_COLOR="1") as terminal:
        terminal.wait_for("npu01", "RUNNING")
        terminal.child.send("q" if code is WITH else "\x03")
        assert terminal.end() == 0
        for codes in re.findall(rb"\x1b\[([0-9;]*)m", terminal.raw):
            parts = codes.split(b";")
            if parts[:2] in ([b"38", b"2"], [b"48", b"2"]):
                assert len(set(parts[2:5])) == 1, codes  # a shade of grey
            else:
                assert not any(part in (b"31", b"32", b"33", b"34", b"35", b"36") for part in parts)


@pytest.mark.slow
def test_a_dumb_terminal_gets_the_print(world: TopWorld) -> None:
    with Terminal(world, WITH, "top", TERM="dumb") as terminal:
        assert terminal.end() == 0
        assert b"npu01" in terminal.raw and b"\x1b" not in terminal.raw


CHECKOUT = Path(__file__).resolve().parents[4]
NAMES = (CHECKOUT / "tests" / "recordings" / "npu_exporter" / "names.txt").read_text().splitlines()
Say = Callable[..., Run]
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture
def fleet(tmp_path: Path, say: Say) -> Iterator[TopWorld]:
    made = make_usual_world(tmp_path / "state")
    with controller_lock(made.state_dir):
        yield made


def read(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> Any:
    """The value of the one series with these labels, None: there is none."""
    found = [value for given, value in samples[name] if labels.items() <= given.items()] if name in samples else []
    assert len(found) < 2, found
    return found[0] if found else None


@pytest.fixture
def samples(fleet: TopWorld, say: Say) -> Samples:
    run = say("metrics", "--once")
    assert run.code == 0, run.err
    return read(run.out)


def test_it_is_scraped_over_http_from_this_machine(fleet: TopWorld) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "ascendrun", "metrics", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        match = re.match(r"(http://127\.0\.0\.1:\d+/metrics)", server.stderr.readline())
        assert match
        with urllib.request.urlopen(match[1], timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            first = read(answer.read().decode())
        assert value(first, "ascendrun_scrape_ok") == 1
        assert value(first, "ascendrun_job_step", job_name="qwen32b-lora") == 1040
        fleet.write_metrics("j-0001", "npu01", 0, steps=50, step_s=1.5, own=1.0)
        with urllib.request.urlopen(match[1], timeout=60) as answer:
            assert value(read(answer.read().decode()), "ascendrun_job_step", job_name="qwen32b-lora") == 1050
    finally:
        server.terminate()
        server.wait(60)
        if server.stderr is not None:
            server.stderr.close()


def test_npus_have_npu_exporter_s_names_labels_and_units(samples: Samples) -> None:
    known = {line for line in NAMES if not line.startswith(("#", "labels:"))}
    labels = set(next(line for line in NAMES if line.startswith("labels:")).split()[1:])
    ours = {name for name in samples if not name.startswith("ascendrun_")}
    assert len(ours) >= 38 and ours <= known
    more = {"npu_chip_info_process_info": {"process_id", "container_id"}}
    for name in ours:
        if name.startswith("npu_chip_"):
            assert all(set(given) == labels | {"host"} | more.get(name, set()) for given, _ in samples[name])
    where = {"host": "npu01", "id": "3"}
    assert value(samples, "npu_chip_info_hbm_total_memory", **where) == 65536  # MB
    assert value(samples, "npu_chip_info_power", **where) == 313
    assert value(samples, "npu_chip_info_health_status", host="npu02", id="6") == 0
    assert value(samples, "npu_chip_info_link_status", host="npu03", id="2") == 0
    assert value(samples, "npu_chip_info_hbm_ecc_single_bit_error_cnt", **where) == 3
    assert value(samples, "npu_chip_link_up_num", **where) == 2
    assert value(samples, "npu_chip_roce_out_of_order_num", **where) == 7
    assert value(samples, "npu_chip_info_process_info", process_id="1003", **where) == 3105
    assert value(samples, "npu_chip_info_power", pcie_bus_info="0000:C1:00.0", **where) == 313
    assert value(samples, "machine_unhealthy_npu_nums", host="npu02") == 1
    assert value(samples, "machine_unknown_npu_nums", host="npu04") == 1


def test_what_is_not_known_is_absent(samples: Samples) -> None:
    where = {"host": "npu04", "id": "0"}
    for name in """
        npu_chip_info_utilization npu_chip_info_power npu_chip_info_health_status
        ascendrun_device_utilization_percent ascendrun_device_healthy
    """.split():
        assert value(samples, name, **where) is None
        assert value(samples, name, host="npu04", id="1") is not None
    assert value(samples, "npu_chip_info_temperature", **where) == 52


def test_jobs_ranks_and_hosts(samples: Samples) -> None:
    job = {"job_id": "j-0001", "job_name": "qwen32b-lora"}
    assert value(samples, "ascendrun_job_state", state="RUNNING", **job) == 1
    assert value(samples, "ascendrun_job_state", state="FAILED", **job) == 0
    assert value(samples, "ascendrun_job_ranks", **job) == 32
    assert value(samples, "ascendrun_job_loss", **job) == pytest.approx(2.1)
    assert value(samples, "ascendrun_job_restarts_total", **job) == 0
    assert value(samples, "ascendrun_rank_slowdown_ratio", rank="11", **job) == pytest.approx(1.18)
    assert value(samples, "ascendrun_rank_straggles", rank="11", **job) == 1
    assert value(samples, "ascendrun_rank_device_info", rank="11", host="npu02", id="3", **job) == 1
    assert value(samples, "ascendrun_host_cpu_percent", host="npu01") == 31
    assert value(samples, "ascendrun_device_external_processes", host="npu04", id="5") == 1
    assert value(samples, "ascendrun_jobs", state="QUEUED") == 1
    assert 0 < value(samples, "ascendrun_host_sample_age_seconds", host="npu01") < 600


def test_figures_of_long_ago_are_not_served_as_those_of_now(say: Say, fleet: TopWorld) -> None:
    fleet.add_job("long", ["old1"])
    fleet.add_samples(["old1"], age_s=300.0)
    found = read(say("metrics", "--once").out)
    assert value(found, "npu_chip_info_power", host="old1", id="0") is None
    assert value(found, "ascendrun_host_cpu_percent", host="old1") is None
    assert value(found, "ascendrun_device_sample_age_seconds", host="old1", id="0") > 299
    assert value(found, "ascendrun_host_has_data", host="old1") == 0


def test_a_state_folder_that_cannot_be_read_is_a_failed_scrape_not_a_dead_exporter(
    say: Say, tmp_path: Path, fleet: TopWorld
) -> None:
    (fleet.state_dir / "samples.db").write_bytes(b"this is no database" * 100)
    run = say("metrics", "--once")
    found = read(run.out)
    assert run.code == 0 and value(found, "ascendrun_scrape_ok") == 0
    assert "samples.db" in found["ascendrun_scrape_failed_info"][0][0]["why"]
    assert not any(name.startswith("npu_") for name in found)
    assert value(found, "ascendrun_job_step", job_name="qwen32b-lora") == 1040  # what can be read is told


def test_the_file_is_whole_and_nothing_is_left_beside_it(say: Say, fleet: TopWorld, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "a.prom").write_text("old\n")
    run = say("metrics", "--textfile", str(folder / "a.prom"), "--once")
    assert (run.code, run.out) == (0, "")
    assert [path.name for path in folder.iterdir()] == ["a.prom"]
    assert value(read((folder / "a.prom").read_text()), "ascendrun_scrape_ok") == 1


def test_a_file_that_cannot_be_written_is_named(say: Say, fleet: TopWorld, tmp_path: Path) -> None:
    run = say("metrics", "--textfile", str(tmp_path / "nowhere" / "a.prom"), "--once")
    assert run.code == 2 and "nowhere/a.prom" in run.err


def test_a_port_that_is_taken_is_a_conflict_with_the_way_out(say: Say, fleet: TopWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = say("metrics", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert run.code == 7 and "cannot listen" in run.err and "--listen" in run.err


@pytest.mark.parametrize(
    "text, meant",
    [
        ("127.0.0.1:9478", ("127.0.0.1", 9478)),
        (":9000", ("127.0.0.1", 9000)),
        ("9000", ("127.0.0.1", 9000)),
        ("[::1]:9", ("::1", 9)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
    ],
)
def test_where_to_listen(text: str, meant: tuple[str, int]) -> None:
    assert parse_listen(text) == meant


@pytest.mark.parametrize("text", ["", "127.0.0.1", "host:", "1:99999", "a:b", ":-1"])
def test_what_is_no_place_to_listen_is_refused(say: Say, text: str, fleet: TopWorld) -> None:
    run = say("metrics", "--listen", text or ":")
    assert run.code == 2 and "--listen" in run.err


def test_only_loopback_is_loopback() -> None:
    assert [
        name for name in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "head") if is_loopback(name)
    ] == ["127.0.0.1", "::1", "localhost"]


# ---------------------------------------------------------------- the dashboard


def expressions(value: Any) -> Iterator[str]:
    """Every PromQL text of the dashboard: of panels, of annotations, of variables."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name in ("expr", "definition") and isinstance(entry, str):
                yield entry
            else:
                yield from expressions(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from expressions(entry)


@pytest.mark.parametrize("board_name", GRAFANA)
def test_the_dashboard_asks_only_for_what_the_exporter_has(say: Say, fleet: TopWorld, board_name: str) -> None:
    fleet.add_samples(
        ["npu01"], job="j-0001", age_s=0.0, changes={("npu01", 0): {"link_tx_bytes_s": 1e9, "link_rx_bytes_s": 1e9}}
    )
    board = yaml.safe_load(Cluster().samples.dashboard(board_name))
    served = read(say("metrics", "--once").out)
    names = {name for text in expressions(board) for name in re.findall(r"\b(?:ascendrun|npu|machine)_\w+", text)}
    assert len(names) > 10 and names - NOT_HERE <= set(served)
    for text in expressions(board):
        for name, chosen in (found for found in re.findall(r"(\w+)\{([^}]*)\}", text) if found[0] not in NOT_HERE):
            labels = set(re.findall(r"(\w+)=~?\"", chosen))
            assert all(labels <= set(given) for given, _ in served[name]), (name, labels)
        for grouped in re.findall(r"by \((\w+)\)", text):
            assert grouped in ("host",)


@pytest.mark.parametrize("board_name", [name for name in GRAFANA if name != "alerts"])
def test_the_dashboard_is_printed_and_its_panels_have_places_of_their_own(say: Say, board_name: str) -> None:
    run = say("metrics", "--grafana", board_name)
    board = json.loads(run.out)
    assert run.code == 0 and board["uid"] == f"ascendrun-{board_name}"
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
