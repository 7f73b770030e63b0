"""Whatever a server does, a question to it ends in time, goes nowhere else, and tells no credential."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Callable

import pytest

from ascendrun.head.notify.http_client import REPLY_BYTES, Cancellation, HttpResponse, RequestFailedError, http_request
from tests.lib.web_service import DRIP, DROP, HANG, Say, Service

Make = Callable[..., Service]


def ask(url: str, *, deadline_s: float = 30.0, body: bytes = b"{}", cut: Cancellation | None = None) -> HttpResponse:
    return http_request(url, headers={"X-A": "b"}, body=body, deadline_s=deadline_s, cancellation=cut)


@pytest.mark.parametrize("status", [200, 204, 400, 404, 429, 500, 503])
def test_an_answer_of_any_status_is_an_answer(serve: Make, status: int) -> None:
    service = serve(Say(status, b"" if status == 204 else b"why", (("Retry-After", "7"),)))
    answer = ask(service.url())
    assert (answer.status, answer.headers["Retry-After"]) == (status, "7")
    assert service.asked[0].headers["X-A"] == "b" and service.asked[0].method == "POST"


@pytest.mark.parametrize("answer", [HANG, DRIP])
def test_a_server_that_never_ends_is_left_in_time(serve: Make, answer: str) -> None:
    with pytest.raises(RequestFailedError, match="within 0.3 s"):
        ask(serve(answer).url(), deadline_s=0.3)


def test_a_server_that_drops_the_connection_is_told_without_the_url(serve: Make) -> None:
    with pytest.raises(RequestFailedError) as caught:
        ask(serve(DROP).url())
    assert "topsecret" not in str(caught.value) and str(caught.value)


def test_a_port_where_nobody_listens(serve: Make) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(RequestFailedError, match="refused"):
            ask(f"http://127.0.0.1:{free.getsockname()[1]}/x")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(serve: Make, status: int) -> None:
    other = serve()
    answer = ask(serve(Say(status, b"", (("Location", other.url()),))).url())
    assert answer.status == status and other.asked == []


def test_of_a_huge_answer_only_the_beginning_is_read(serve: Make) -> None:
    assert len(ask(serve(Say(200, b"x" * (REPLY_BYTES * 4))).url()).body) == REPLY_BYTES


def test_a_question_can_be_cut_from_another_thread(serve: Make) -> None:
    service, cut = serve(HANG), Cancellation()
    cutter = threading.Thread(target=lambda: (service.await_asked(1), cut.cancel()))
    cutter.start()
    with pytest.raises(RequestFailedError):
        ask(service.url(), deadline_s=120.0, cut=cut)
    cutter.join()


def test_the_proxy_of_the_environment_is_asked(serve: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = serve(Say(200, b"by proxy"))
    monkeypatch.setenv("http_proxy", proxy.url(""))
    monkeypatch.setenv("no_proxy", "")
    assert ask("http://webhook.invalid/x").body == b"by proxy"
    assert proxy.asked[0].path == "http://webhook.invalid/x"


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            "key",
            "-out",
            "cert",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            peer, _ = listener.accept()
            try:
                context.wrap_socket(peer, server_side=True).close()
            except OSError:
                peer.close()

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(RequestFailedError, match="(?i)certificate"):
            ask(f"https://localhost:{listener.getsockname()[1]}/hook/topsecret")
        thread.join()
