"""The dashboard over real hosts, in a real browser: what happens to a job is shown while the page is open."""

import subprocess
import sys
from pathlib import Path

import pytest
from scenes import ENOUGH, Scene

from tests.lib.vcluster.cluster import VirtualCluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "web"))

from browser import find_browser
from live_browser import Page, open_browser

PROGRAM = f"""
import os, time
while not os.path.exists({ENOUGH!r}):
    time.sleep(0.1)
if os.environ["RANK"] == "2":
    raise ValueError("sample 17 has no label")
time.sleep(60)
"""


def press(page: Page, selector: str) -> None:
    """Press a button, and consent to the question that it asks."""
    page.run(f"window.confirm = () => true, document.querySelector({selector!r}).click()")


def test_a_job_is_edited_submitted_and_stopped_and_a_node_drained_in_the_browser(
    scene: Scene, cluster: VirtualCluster, tmp_path: Path
) -> None:
    (scene.folder / "code" / "train.py").write_text("import time\ntime.sleep(600)\n")
    file = scene.job("edited", command=["python3", "train.py"])
    right = file.read_text() + "env: {API_TOKEN: secret}\n"
    file.write_text(right.replace("name: edited", "nmae: edited"))
    served = scene.ascendrun.popen("dashboard", "--no-browser", "--allow-actions", stdout=subprocess.PIPE, text=True)
    try:
        url = served.stdout.readline().strip()
        base = url.partition("?")[0]
        with open_browser(find_browser() or "", tmp_path / "b", lambda argv: cluster.head_argv(argv, cwd="/")) as page:
            page.show_as(1280)
            page.open(url, ready="location.search === '' && document.querySelector('main') !== null")
            page.open(f"{base}submit?file={file}")
            press(page, "button[value=submit]")
            page.wait("document.querySelector('[role=alert]') !== null")
            assert "nmae" in page.run("document.querySelector('[role=alert]').innerText")
            page.run(f"editor.value = {right!r}")
            press(page, "button[value=submit]")
            page.wait("document.querySelector('section[role=status] a') !== null", seconds=60)
            assert "API_TOKEN" in page.run("document.querySelector('section[role=status]').innerText")
            page.run("document.querySelector('section[role=status] a').click()")
            page.wait("document.querySelector('#live_state .RUNNING') !== null", seconds=60)
            assert file.read_text() == right
            page.run("window.confirm = () => false, document.querySelector(\"form[action$='/stop'] button\").click()")
            assert "stop-requested" not in scene.ascendrun("events", "edited").stdout
            press(page, "form[action$='/stop'] button")
            page.wait("document.querySelector('#live_state .STOPPED') !== null", seconds=60)
            page.open(f"{base}nodes")
            press(page, "form[action='/nodes/node1/drain'] button")
            page.wait("document.querySelector('#live_state .closed') !== null")
            page.open(f"{base}check")
            page.wait("document.querySelector('#live_check table') !== null", seconds=90)
            page.open(f"{base}nodes/node1")
            press(page, "form[action='/nodes/node1/undrain'] button")
            page.wait("document.querySelector('#live_state .closed') === null", seconds=90)
            assert page.complaints == []
    finally:
        served.terminate()
        served.wait(30)
        served.stdout.close()


def test_a_job_that_fails_shows_its_first_failing_rank_and_the_cause_without_a_reload(
    scene: Scene, cluster: VirtualCluster, tmp_path: Path
) -> None:
    browser = find_browser()
    if browser is None:
        pytest.fail("no Chromium here; on Debian apt install chromium", pytrace=False)
    (scene.folder / "code" / "train.py").write_text(PROGRAM)
    job = scene.start(scene.job("fails", command=["python3", "train.py"]))
    served = scene.ascendrun.popen("dashboard", "--no-browser", stdout=subprocess.PIPE, text=True)
    try:
        url = served.stdout.readline().strip()
        with open_browser(browser, tmp_path / "browser", lambda argv: cluster.head_argv(argv, cwd="/")) as page:
            page.show_as(1280)
            page.open(url, ready="location.search === '' && document.querySelector('main') !== null")
            page.open(f"{url.partition('?')[0]}jobs/{job}")
            page.wait("document.querySelector('#live_state .RUNNING') !== null", seconds=60)
            page.run("window.isTheSame = true")
            scene.enough()
            page.wait("document.querySelector('#live_state .FAILED') !== null", seconds=60)
            page.wait("document.querySelector('#live_diagnosis').innerText.includes('sample 17')", seconds=30)
            shown = page.run("document.querySelector('#live_diagnosis').innerText")
            assert "rank 2" in shown and "node2" in shown and "ValueError" in shown, shown
            assert page.run("window.isTheSame") is True and page.complaints == []
    finally:
        served.terminate()
        served.wait(30)
        served.stdout.close()
