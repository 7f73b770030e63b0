"""The pages of the dashboard in a real browser: live, in both languages, accessible at every width."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import find_browser
from dashboard_site import Site, serve
from live_browser import Page, open_browser

from ascendrun.cli.dashboard.app import make_app
from ascendrun.cli.dashboard.jobpage import Kept
from ascendrun.cluster import Cluster
from ascendrun.core.jobs.job import State
from ascendrun.core.settings import Settings
from ascendrun.head.spool.spool_files import TIME_RECORD, StreamFiles
from ascendrun.head.state.state_dir import spool_dir
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world, make_world, sample_usual_hosts, write_pulse

HERE = Path(__file__).parent
SCHEMA = HERE.parents[1] / "docs" / "dashboard-api.json"
AXE = HERE / "vendor" / "axe-core" / "axe.min.js"
PATHS = [
    *("/", "/jobs/j-0001", "/jobs/j-0003", "/jobs/j-0001/logs", "/nodes", "/nodes/npu01", "/check", "/submit"),
    *("/compare?jobs=j-0001,j-0003", "/usage?by=month", "/api/docs", "/none"),
]
SERIOUS = """
    axe.run().then((found) => found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .map((one) => one.id + ": " + one.nodes.map((node) => node.html).slice(0, 3).join(" ")))
    """


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.fail("no Chromium here; on Debian apt install chromium", pytrace=False)
    with open_browser(browser, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TopWorld]:
    state_dir = tmp_path_factory.mktemp("state") / "s"
    world = make_usual_world(state_dir)
    bert = world.add_job("bert", ["npu12"], state=State.FAILED)
    oom = "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)"
    write_log(
        state_dir, bert, "npu12", 0, [(world.now_s - 40, "Traceback (most recent call last):"), (world.now_s, oom)]
    )
    with controller_lock(state_dir):
        yield world


@pytest.fixture(scope="module")
def site(world: TopWorld) -> Iterator[Site]:
    with serve(world.state_dir, actions=True) as site:
        yield site


@pytest.fixture(autouse=True)
def what_the_controller_knows_is_new(world: TopWorld) -> None:
    write_pulse(world.state_dir)
    world.now_s = time.time()
    sample_usual_hosts(world, "j-0001")


def enter(page: Page, site: Site, path: str = "/", *, width: int = 1280, dark: bool = False, lang: str = "en") -> None:
    page.show_as(width, dark=dark, lang=lang)
    page.open(site.url, ready="location.search === '' && document.querySelector('main') !== null")
    page.complaints.clear()
    if path != "/":
        page.open(f"http://127.0.0.1:{site.port}{path}")


def test_the_overview_shows_jobs_queue_devices_and_what_needs_a_person(page: Page, site: Site) -> None:
    enter(page, site)
    shown = page.run("document.querySelector('main').innerText")
    assert "qwen32b-lora" in shown and "1040/5000" in shown and "npu[01-04]" in shown
    assert page.run("document.querySelectorAll('#live_nodes .cell').length") == 72
    assert page.run("document.querySelectorAll('#live_nodes .cell.bad').length") == 2
    attention = page.run("document.querySelector('#live_attention').innerText")
    assert "bert" in attention and "npu02:6" in attention and "npu03:2" in attention
    assert page.complaints == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("width", "dark", "lang"), [(360, False, "zh-CN"), (1280, True, "en"), (2560, False, "en")])
def test_every_page_is_accessible_and_fits(
    page: Page, site: Site, path: str, width: int, dark: bool, lang: str
) -> None:
    enter(page, site, path, width=width, dark=dark, lang=lang)
    page.call("Runtime.evaluate", expression=AXE.read_text())
    assert page.run(SERIOUS) == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.documentElement.lang") == ("zh-CN" if lang == "zh-CN" else "en")


def test_a_job_has_curves_and_a_line_for_each_rank(page: Page, tmp_path: Path) -> None:
    make_usual_world(tmp_path / "s")
    with controller_lock(tmp_path / "s"), serve(tmp_path / "s") as site:
        enter(page, site, "/jobs/j-0001")
        page.wait("document.querySelector('[data-heat][data-drawn]') !== null")
        assert page.run("document.querySelectorAll('#curves canvas').length") >= 5
        data = json.loads(page.run("document.querySelector('[data-heat]').dataset.heat"))
        page.run("document.querySelector('#smooth').click()")
        assert page.complaints == []
    assert data["ranks"] == list(range(32)) and 88 in data["load"][0] and any(data["step"][0])


def test_the_nodes_show_their_state_devices_and_past(site: Site) -> None:
    page = site.get("/nodes").body
    assert page.count('role="img" class="cell') == 72 and ">held<" in page and "npu12" in page
    assert "qwen32b-lora" in site.get("/nodes/npu01").body and "bert" in site.get("/nodes/npu12").body
    assert site.get("/nodes/none").status == 404


def test_each_reader_gets_a_node_in_their_language(page: Page, site: Site) -> None:
    titles = "[...document.querySelectorAll('#curves h2')].map((one) => one.innerText)"
    found = []
    for lang in ("en", "zh-CN"):
        enter(page, site, "/nodes/npu02", lang=lang)
        found.append(page.wait(f"{titles}.length > 0 && {titles}"))
    assert "Host CPU, %" in found[0] and not set(found[0]) & set(found[1])


def test_jobs_are_compared_by_their_curves_and_by_what_differs(page: Page, world: TopWorld, site: Site) -> None:
    other = world.add_job("other", ["npu20"], state=State.SUCCEEDED)
    enter(page, site, f"/compare?jobs=j-0001,{other}")
    page.wait("document.querySelectorAll('#curves canvas').length >= 1")
    chart = json.loads(page.run("document.querySelector('[data-charts]').dataset.charts"))["charts"][0]
    assert chart["labels"][0] == "qwen32b-lora j-0001" and len(chart["xs"]) == len(chart["lines"][0])
    options = page.run("document.querySelector('[aria-labelledby=options] table').innerText")
    assert "name\tqwen32b-lora\tother" in options
    assert site.get("/compare?jobs=" + ",".join(f"j-{number}" for number in range(9))).status == 400
    assert page.complaints == []


def test_the_editor_offers_the_keys_of_the_place_and_explains_the_present_one(
    page: Page, site: Site, tmp_path: Path
) -> None:
    (tmp_path / "train.yaml").write_text("name: train\nrestart:\n  max")
    enter(page, site, f"/submit?file={tmp_path / 'train.yaml'}")
    page.wait("document.querySelectorAll('#offered button').length > 0")
    page.run("editor.focus(), editor.selectionStart = editor.value.length, editor.click()")
    page.wait("document.querySelector('#offered button').innerText === 'max_restarts'")
    page.run("document.querySelector('#offered button').click()")
    assert page.run("editor.value").endswith("restart:\n  max_restarts: ")
    assert page.run("about.innerText").startswith("restart.max_restarts:")
    assert page.complaints == []


def write_log(
    state_dir: Path, job: str, host: str, rank: int, lines: list[tuple[float, str]], *, hole: int = 0
) -> None:
    """The output of a rank with arrival times; it begins with a hole of so many bytes."""
    folder = spool_dir(state_dir, job, 1) / host
    folder.mkdir(parents=True, exist_ok=True)
    files = StreamFiles(folder, host, rank, "out", 1)
    end, times = hole, [TIME_RECORD.pack(hole, int((lines[0][0] - 60) * 1e9))] if hole else []
    with open(files.path(0), "wb") as out:
        out.seek(hole)
        for at_s, text in lines:
            end += out.write(f"{text}\n".encode())
            times.append(TIME_RECORD.pack(end, int(at_s * 1e9)))
    files.times_path(0).write_bytes(b"".join(times))


def shown_lines(site: Site, query: str = "") -> list[str]:
    return re.findall(r'<td class="line">(.*?)</td>', site.get(f"/jobs/j-0001/logs{query}").body)


def test_the_log_is_filtered_by_rank_node_level_text_and_time(page: Page, tmp_path: Path) -> None:
    state_dir, now_s = tmp_path / "s", time.time()
    make_usual_world(state_dir)
    write_log(
        state_dir, "j-0001", "npu01", 0, [(now_s - 90, "start"), (now_s - 50, "RuntimeError: <b>no</b>"), (now_s, "go")]
    )
    write_log(state_dir, "j-0001", "npu02", 9, [(now_s - 70, "other"), (now_s - 1, "go")])
    with controller_lock(state_dir), serve(state_dir) as site:
        assert shown_lines(site) == ["start", "other", "RuntimeError: &lt;b&gt;no&lt;/b&gt;", "go", "go"]
        assert shown_lines(site, "?ranks=9") == ["other", "go"] == shown_lines(site, "?hosts=npu02")
        assert shown_lines(site, "?level=error") == shown_lines(site, "?text=runtime") == [shown_lines(site)[2]]
        assert shown_lines(site, f"?at=@{now_s - 60}")[0].startswith("RuntimeError")
        assert site.get("/jobs/j-0001/logs?ranks=x").status == 400
        assert site.get("/jobs/j-0001/logs?ranks=99").status == 404
        enter(page, site, "/jobs/j-0001/logs?ranks=0", width=360)
        page.call("Runtime.evaluate", expression=AXE.read_text())
        assert page.run(SERIOUS) == [] and page.run("document.documentElement.scrollWidth") <= 360
        with open(spool_dir(state_dir, "j-0001", 1) / "npu01" / "rank-0.out.0", "a") as out:
            out.write("later line\n")
        page.wait("document.querySelector('#live_lines').innerText.includes('later line')", seconds=10)
        assert page.complaints == []


def test_a_log_of_two_gigabytes_is_opened_from_its_end_and_from_a_time(tmp_path: Path) -> None:
    took_s = []
    for name, hole in (("small", 0), ("large", 2 << 30)):
        state_dir, now_s = tmp_path / name, time.time()
        make_usual_world(state_dir)
        write_log(
            state_dir, "j-0001", "npu01", 0, [(now_s - 5 + i / 1000, f"line {i}") for i in range(2000)], hole=hole
        )
        with controller_lock(state_dir), serve(state_dir) as site:
            site.get("/jobs/j-0001/logs")
            began_s = time.monotonic()
            assert shown_lines(site, "?ranks=0")[-1] == "line 1999"
            assert shown_lines(site, f"?ranks=0&at=@{now_s - 4}")[-1] == "line 1399"
            assert shown_lines(site, f"?ranks=0&text=line+17&at=@{now_s - 4}")[-1] == "line 1799"
            took_s.append(time.monotonic() - began_s)
    assert took_s[1] < 10 * took_s[0], took_s


def test_outputs_are_downloaded_and_no_other_file(site: Site, world: TopWorld) -> None:
    folder = world.state_dir / "outputs" / "j-0001"
    (folder / "out").mkdir(parents=True)
    (folder / "out" / "<b>.html").write_text("<script>alert(1)</script>")
    (folder / "link").symlink_to("/etc/passwd")
    assert "out/&lt;b&gt;.html" in site.get("/jobs/j-0001").body
    reply = site.get("/jobs/j-0001/outputs/out/%3Cb%3E.html")
    assert reply.status == 200 and reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["content-disposition"].startswith("attachment")
    for name in ("link", "../../jobs.db", "..%2f..%2fjobs.db", "%2fetc%2fpasswd", "out"):
        assert site.get(f"/jobs/j-0001/outputs/{name}").status == 404, name


def test_a_new_job_appears_without_a_reload(page: Page, site: Site, world: TopWorld) -> None:
    enter(page, site)
    page.run("window.isTheSame = true")
    world.add_job("later", ["npu33"], state=State.QUEUED, steps=0)
    page.wait("document.querySelector('#live_queue').innerText.includes('later')", seconds=10)
    assert page.run("window.isTheSame") is True and page.complaints == []


def test_only_the_nodes_that_changed_are_drawn_again(page: Page, site: Site, world: TopWorld) -> None:
    enter(page, site)
    busy, idle = (f"document.querySelector('#live_node_{host} .cell')" for host in ("npu01", "npu05"))
    for load in (12, 34):
        page.run(f"{idle}.isTheSame = true")
        world.now_s = time.time() + load / 100  # a new sample
        world.add_samples(["npu01"], job="j-0001", changes={("npu01", 0): {"utilisation": load}})
        page.wait(f"{busy}.title.includes('{load}%')", seconds=10)
    assert page.run(f"{idle}.isTheSame") is True and page.complaints == []


def test_while_one_value_is_read_others_are_shown_and_the_same_one_is_read_once() -> None:
    kept, began, may_end = Kept(), threading.Event(), threading.Event()
    reads: list[str] = []

    def read_check() -> str:
        reads.append("check")
        began.set()
        assert may_end.wait(60)
        return "report"

    with ThreadPoolExecutor() as pool:
        first = pool.submit(kept.get, "check", read_check, seconds=60)
        assert began.wait(60)
        second = pool.submit(kept.get, "check", read_check, seconds=60)
        assert kept.get("job", lambda: "curves", seconds=60) == "curves" and not second.done()
        may_end.set()
        assert (first.result(), second.result(), reads) == ("report", "report", ["check"])


def test_who_waits_for_a_value_that_cannot_be_read_gets_the_error_of_that_reading() -> None:
    kept, may_end = Kept(), threading.Event()
    reads: list[int] = []
    errors: list[type[BaseException]] = []

    def read_check() -> str:
        reads.append(threading.get_ident())
        assert may_end.wait(60)
        return Path("/nonexistent").read_text()

    def show_check() -> None:
        try:
            kept.get("check", read_check, seconds=60)
        except OSError as error:
            errors.append(type(error))

    viewers = [threading.Thread(target=show_check) for _ in range(3)]
    for viewer in viewers:
        viewer.start()
    while any(not {"result", "read_check"} & functions_of(viewer) for viewer in viewers):
        time.sleep(0.01)
    may_end.set()
    for viewer in viewers:
        viewer.join(60)
    assert len(reads) == 1 and errors == [FileNotFoundError] * 3
    assert kept.get("check", lambda: "there", seconds=60) == "there"


def functions_of(thread: threading.Thread) -> set[str]:
    """The names of the functions in which a thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    return {frame.f_code.co_name for frame, _ in traceback.walk_stack(frame)} if frame else set()


def test_the_stream_of_a_job_that_is_gone_ends(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert site.get("/live/jobs/j-0999").body == "" and caplog.records == []


def test_what_is_no_longer_updated_is_marked(page: Page, world: TopWorld) -> None:
    with serve(world.state_dir) as site:
        enter(page, site)
        assert page.run("document.getElementById('stale').hidden") is True
    page.run("{ const now = Date.now; Date.now = () => now() + 16000; }")
    page.wait("document.getElementById('stale').hidden === false")  # a beat may have been on its way
    assert page.run("document.body.classList.contains('is-stale')") is True


def test_a_device_that_was_not_observed_lately_has_no_number(tmp_path: Path) -> None:
    world = make_world(tmp_path / "s")
    job = world.add_job("train", ["npu01"], per_node=2)
    world.add_samples(["npu01"], job=job, per_node=2, age_s=20.0)
    with controller_lock(tmp_path / "s"), serve(tmp_path / "s") as site:
        page = site.get("/").body
    assert "88" not in page.partition('id="live_nodes"')[2].partition("</section>")[0]


def test_the_api_returns_what_commands_print(site: Site) -> None:
    assert [job["id"] for job in json.loads(site.get("/api/v1/jobs").body)["jobs"]][-1] == "j-0001"
    assert json.loads(site.get("/api/v1/jobs/j-0001").body)["job"]["name"] == "qwen32b-lora"
    assert len(json.loads(site.get("/api/v1/top").body)["rows"]) == 72
    assert json.loads(site.get("/api/v1/jobs/j-0003/explain").body)["diagnosis"]["code"]
    for path in ("jobs/j-0001/events", "jobs/j-0001/report", "machines", "history"):
        assert json.loads(site.get(f"/api/v1/{path}").body)["schema_version"] == 2
    missing = site.get("/api/v1/jobs/j-0999")
    assert missing.status == 404 and json.loads(missing.body)["error"]["code"] == "not-found"


def test_the_use_of_devices_is_summed_by_user_and_month(site: Site, world: TopWorld) -> None:
    world.add_job("used", ["npu31"], state=State.FAILED)
    month = time.strftime("%Y-%m")
    by_month, all_time = site.get("/usage?by=month").body, site.get("/usage?by=user&days=").body
    assert f"<td>{month}</td>" in by_month and "<td>–</td>" in all_time
    assert '<option value="user" selected>' in site.get("/usage?by=none&days=x").body
    rows = json.loads(site.get("/api/v1/history?by=month").body)["months"]
    assert rows[0]["month"] == month and rows[0]["failed_hours"] is not None
    assert site.get("/api/v1/history?by=none").status == 422


def test_the_api_is_that_of_its_version(tmp_path: Path) -> None:
    """After an addition, write the file again. After a removal or another meaning, increase API_VERSION first."""
    schema = make_app(Cluster(Settings(state_dir=tmp_path))).openapi()
    assert json.loads(SCHEMA.read_text()) == schema


def test_ten_thousand_past_jobs_cost_the_overview_little(tmp_path: Path) -> None:
    world = make_world(tmp_path / "s")
    with controller_lock(tmp_path / "s"), serve(tmp_path / "s") as site:
        took_s = []
        for count in (50, 10_000):
            world.add_past(count)
            tries = []
            for _ in range(5):
                began_s = time.monotonic()
                assert "past" in site.get("/").body
                tries.append(time.monotonic() - began_s)
            took_s.append(min(tries))
    assert took_s[1] < 10 * took_s[0], took_s
