"""Attacks on the dashboard over HTTP: none of them reads or changes anything; and what the command demands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_site import TOKEN, Site, serve

from ascendrun.cli.dashboard.actions import csrf_of
from ascendrun.cli.dashboard.gate import HEADERS, Access
from tests.lib.top_world import controller_lock, make_usual_world, make_world

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x1b[31m\u202e=cmd()"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    state_dir = tmp_path_factory.mktemp("state") / "s"
    make_usual_world(state_dir)
    with controller_lock(state_dir), serve(state_dir) as site:
        yield site


@pytest.mark.parametrize("path", ["/", "/live/", "/api/v1/jobs", "/api/openapi.json", "/static/style.css", "/none"])
def test_without_the_token_nothing_is_served(site: Site, path: str) -> None:
    assert site.get(path, is_known=False).status == 401
    assert site.get(path, {"Cookie": f"ascendrun-{site.port}=wrong"}, is_known=False).status == 401
    assert site.get(path, {"Authorization": "Bearer wrong"}, is_known=False).status == 401


def test_a_wrong_token_in_the_address_sets_no_cookie(site: Site) -> None:
    reply = site.get("/?token=wrong", is_known=False)
    assert reply.status == 401 and "set-cookie" not in reply.headers


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(site: Site) -> None:
    reply = site.get(f"/?token={TOKEN}", is_known=False)
    cookie = reply.headers["set-cookie"].lower()
    assert reply.status == 200 and "httponly" in cookie and "samesite=strict" in cookie
    assert "url=/" in reply.body and TOKEN not in reply.body  # the page with the token in its address is left at once
    assert site.get("/api/v1/jobs", {"Authorization": f"Bearer {TOKEN}"}, is_known=False).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", f"/?token={TOKEN}", "/api/v1/jobs", "/none", "/static/style.css"]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_no_reply_lets_a_referer_or_an_inline_script_through(site: Site, path: str, is_known: bool) -> None:
    headers = {name.lower(): value for name, value in site.get(path, is_known=is_known).headers.items()}
    assert headers["referrer-policy"] == "no-referrer"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "access-control-allow-origin" not in headers
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert all(headers[name.lower()] == value for name, value in HEADERS.items())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "10.0.0.1", ""]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused_with_the_cookie_too(site: Site, host: str) -> None:
    assert site.get("/", {"Host": host.format(port=site.port)}).status == 421
    assert site.get(f"/?token={TOKEN}", {"Host": host.format(port=site.port)}).status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_a_request_of_another_site_is_refused_with_the_cookie_too(site: Site, headers: dict[str, str]) -> None:
    assert site.get("/api/v1/jobs", headers).status == 403
    assert site.get("/", headers, method="POST").status == 403
    assert "access-control-allow-origin" not in site.get("/", headers, method="OPTIONS").headers


def test_its_own_requests_and_tunnels_of_another_port_are_served(site: Site) -> None:
    own = {"Origin": f"http://localhost:{site.port}", "Host": f"localhost:{site.port}", "Sec-Fetch-Site": "same-origin"}
    assert site.get("/", own).status == 200
    assert site.get("/", {"Host": "localhost:1234", "Sec-Fetch-Site": "none"}).status == 200
    assert site.get("/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(site: Site, method: str) -> None:
    assert site.get("/api/v1/jobs", method=method).status == 405
    assert site.get("/jobs/j-0001/stop", method=method).status == 405


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[Site]:
    make_usual_world(tmp_path / "s")
    with controller_lock(tmp_path / "s"), serve(tmp_path / "s", actions=True) as site:
        yield site


@pytest.mark.parametrize("path", ["/jobs/j-0001/stop", "/nodes/npu01/drain", "/submit"])
def test_a_form_without_its_proof_or_of_another_site_changes_nothing(acting: Site, path: str) -> None:
    own, csrf = {"Origin": f"http://127.0.0.1:{acting.port}"}, csrf_of(TOKEN)
    assert acting.get(path, own, method="POST").status == 409
    assert acting.get(path, own, method="POST", form={"csrf": csrf_of("of another dashboard")}).status == 409
    assert acting.get(path, {}, method="POST", form={"csrf": csrf}).status == 403
    assert acting.get(path, {"Origin": "https://evil.example"}, method="POST", form={"csrf": csrf}).status == 403
    assert acting.get(path, own, method="POST", form={"csrf": csrf}, is_known=False).status == 401
    assert acting.get(path, own, method="PUT", form={"csrf": csrf}).status == 405
    assert "stop-requested" not in acting.get("/api/v1/jobs/j-0001/events").body


def test_a_job_file_is_checked_as_edited_and_written_only_when_it_is_submitted(acting: Site, tmp_path: Path) -> None:
    file, form = tmp_path / "train.yaml", {"csrf": csrf_of(TOKEN), "file": str(tmp_path / "train.yaml")}
    file.write_text("name: train\n")
    own = {"Origin": f"http://127.0.0.1:{acting.port}"}
    assert "name: train" in acting.get(f"/submit?file={file}").body
    bad = "name: train\ncommand: [python, <b>.py]\nnodse: 2\n"
    reply = acting.get("/submit", own, method="POST", form={**form, "text": bad, "step": "submit"})
    assert reply.status == 200 and "nodse" in reply.body and "&lt;b&gt;.py" in reply.body
    assert file.read_text() == "name: train\n" and sorted(path.name for path in tmp_path.iterdir()) == [
        "s",
        "train.yaml",
    ]
    for name in ("relative.yaml", "/etc/passwd", "/none/job.yaml", "~nobody-here/job.yaml", "/proc/job.yaml", ""):
        assert (
            'role="alert"'
            in acting.get("/submit", own, method="POST", form={**form, "file": name, "text": "name: x\n"}).body
        ), name
    assert acting.get("/submit?file=/etc/passwd").status == 400


def test_bound_names_are_known_and_addresses_only_where_it_listens_on_all() -> None:
    assert Access("t", 1, frozenset({"head"}))._knows("HEAD") and not Access("t", 1)._knows("10.0.0.2")
    everywhere = Access("t", 1, any_address=True)
    assert everywhere._knows("10.0.0.2") and everywhere._knows("[fd00::1]") and not everywhere._knows("evil.example")


def test_names_of_jobs_and_hosts_never_become_markup(tmp_path: Path) -> None:
    world = make_world(tmp_path / "s")
    job = world.add_job(HOSTILE, [HOSTILE], per_node=2, steps=0)
    world.add_samples([HOSTILE], job=job, per_node=2, changes={(HOSTILE, 0): {"health": HOSTILE, "name": HOSTILE}})
    with controller_lock(tmp_path / "s"), serve(tmp_path / "s") as site:
        page = site.get("/").body
        assert "<script>alert" not in page and "<img" not in page and "&lt;img" in page
        assert "\x1b" not in page and "\u202e" not in page
        assert json.loads(site.get("/api/v1/jobs").body)["jobs"][0]["name"] == HOSTILE
        lines = [{"step": 1, "loss": 2.0, f"eval_{HOSTILE}": 1.0, HOSTILE: 2.0}]
        lines += [{"event": "checkpoint", "timestamp": 2.0, "step": 1, "path": HOSTILE, "size_bytes": 9}]
        world.write_metrics(job, "host", 0, steps=1, step_s=1.0, own=1.0)
        metrics = next((tmp_path / "s").rglob("rank-0.metrics.0"))
        metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        page = site.get(f"/jobs/{job}").body
        assert "cmd()" in page.partition('id="live_checkpoints"')[2].partition("</section>")[0]
        assert "<script>alert" not in page and "<img" not in page and "\x1b" not in page
        assert site.get("/%3Cscript%3Ealert(1)%3C/script%3E").body.count("<script>") == 0


def start(state_dir: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ascendrun", "--state-dir", str(state_dir), "dashboard", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8", **environ},
    )


@pytest.mark.parametrize(
    "arguments",
    [["--bind", "0.0.0.0"], ["--bind", "192.0.2.1"], ["--bind", "::", "--port", "0"], ["--tls-cert", __file__]],
)
def test_another_address_needs_a_certificate_or_an_explicit_flag(tmp_path: Path, arguments: list[str]) -> None:
    ran = start(tmp_path, *arguments)
    out, err = ran.communicate(timeout=60)
    assert ran.returncode == 2 and out == "" and "--tls-key" in err


def test_the_command_prints_its_address_and_the_way_from_another_machine(tmp_path: Path) -> None:
    ran = start(tmp_path, "--no-browser", SSH_CONNECTION="10.0.0.9 5000 10.0.0.2 22", USER="ana")
    try:
        assert ran.stdout is not None
        url = ran.stdout.readline().strip()
        address, _, token = url.partition("/?token=")
        port = int(address.rpartition(":")[2])
        assert address == f"http://127.0.0.1:{port}" and len(token) >= 40
        reply = Site(port).get("/", {"Authorization": f"Bearer {token}"}, is_known=False)
        assert reply.status == 200
    finally:
        ran.send_signal(signal.SIGINT)
        _, err = ran.communicate(timeout=60)
    assert f"ssh -N -L {port}:127.0.0.1:{port} ana@10.0.0.2" in err and "Traceback" not in err
    assert ran.returncode == 0


def test_with_a_certificate_it_serves_https_on_another_address(tmp_path: Path) -> None:
    import ssl
    import urllib.request

    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-subj", "/CN=head"]
    subprocess.run(["openssl", *map(str, made)], check=True, capture_output=True)
    ran = start(tmp_path, "--no-browser", "--bind", "0.0.0.0", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        assert ran.stdout is not None
        url = ran.stdout.readline().strip()
        port, token = int(url.rpartition("/?")[0].rpartition(":")[2]), url.rpartition("=")[2]
        trusting = ssl._create_unverified_context()
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/?token={token}", context=trusting, timeout=30) as reply:
            assert "secure" in reply.headers["Set-Cookie"].lower() and url.startswith("https://")
    finally:
        ran.send_signal(signal.SIGINT)
        ran.communicate(timeout=60)


def test_without_its_packages_the_command_names_them(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ImportError('no', name='fastapi')")
    ran = start(tmp_path / "s", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    _, err = ran.communicate(timeout=60)
    assert ran.returncode == 3 and "pip install 'ascendrun[web]'" in err
