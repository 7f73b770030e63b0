"""The HTTP server of the programs: limits, bad requests, clients that leave, slow ones, and its end."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ascendrun.programs.generation.requests import Limits, read_json
from ascendrun.programs.generation.server import TOKEN, Server
from tests.lib.vcluster.processes import await_that
from tests.programs.asking import JSON, ask


class World:
    """A server whose model answers when it is let go, and who asked it what."""

    def __init__(self, **limits: Any) -> None:
        self.free, self.over = threading.Event(), threading.Event()
        self.free.set()
        self.most = 4
        self.batches: list[list[Any]] = []
        self.gone: list[Any] = []
        self.ended: list[bool] = []
        self.clients: list[http.client.HTTPConnection] = []
        self.server = Server(
            "127.0.0.1",
            0,
            pages={"/health": lambda: {"waiting": self.server.queue.waiting}},
            routes={"/echo": read_json, "/bad": self.fail, "/stream": read_json},
            limits=Limits(**{"silence_s": 60.0, "answer_s": 60.0, **limits}),
        )
        self.thread = threading.Thread(target=lambda: self.ended.append(self.server.serve(self.over.is_set, self.work)))
        self.thread.start()

    def fail(self, body: bytes) -> Any:
        raise ZeroDivisionError

    def work(self, wait_s: float) -> None:
        batch = self.server.queue.take(self.most, wait_s)
        if not batch:
            return
        self.batches.append([each.content for each in batch])
        self.free.wait(60)
        for request in batch:
            if request.path == "/stream":
                for number in range(request.content["parts"]):
                    request.send(f"data: {number}{'x' * request.content.get('size', 0)}\n\n")
                    if request.is_gone:
                        self.gone.append(request.content)
                        break
                    time.sleep(request.content.get("pause", 0))
                request.end()
            else:
                time.sleep(request.content.get("pause", 0))
                request.reply(request.content)

    def stop(self) -> bool:
        self.over.set()
        self.free.set()
        self.thread.join(120)
        assert self.ended, "the server still runs"
        return self.ended[0]

    def connect(self) -> http.client.HTTPConnection:
        self.clients.append(http.client.HTTPConnection(*self.server.address, timeout=60))
        return self.clients[-1]

    def ask(self, body: Any, path: str = "/echo", headers: Any = None) -> tuple[int, Any]:
        return ask(self.server.address, "POST", path, body, headers)

    def send(self, raw: bytes) -> bytes:
        """All that is replied to these bytes, until the server closes the connection."""
        with socket.create_connection(self.server.address, timeout=60) as link:
            link.sendall(raw)
            found = b""
            while part := link.recv(65536):
                found += part
        return found


@pytest.fixture
def make() -> Iterator[Any]:
    worlds: list[World] = []

    def begin(**limits: Any) -> World:
        worlds.append(World(**limits))
        return worlds[-1]

    yield begin
    for world in worlds:
        for client in world.clients:
            client.close()
        if not world.ended:
            world.stop()


def test_a_connection_serves_several_requests(make):
    world = make()
    client = world.connect()
    for number in range(3):
        client.request("POST", "/echo", json.dumps({"number": number}), JSON)
        assert json.loads(client.getresponse().read()) == {"number": number}
    client.request("GET", "/health?all=1")
    assert json.loads(client.getresponse().read()) == {"waiting": 1}


def test_requests_that_wait_are_taken_together(make):
    world = make()
    world.free.clear()
    clients = [world.connect() for _ in range(6)]
    for number, client in enumerate(clients):
        client.request("POST", "/echo", json.dumps({"number": number}), JSON)
        await_that(lambda: world.batches)  # the first alone: the others wait while it is answered
    await_that(lambda: len(world.server.queue) == 5)
    world.free.set()
    assert sorted(json.loads(client.getresponse().read())["number"] for client in clients) == list(range(6))
    assert [len(batch) for batch in world.batches] == [1, 4, 1]


HOST = b"Host: 127.0.0.1\r\n"
HEAD = b"POST /echo HTTP/1.1\r\nContent-Type: application/json\r\n" + HOST


@pytest.mark.parametrize(
    "raw, status",
    [
        (b"hello\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\nConnection: close\r\n\r\n", 421),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", 200),
        (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n[]", 400),
        (HEAD + b"Connection: close\r\nContent-Length: 4\r\n\r\n\xff\xff{}", 400),
        (HEAD + b'Connection: close\r\nContent-Length: 12\r\n\r\n{"a": 1e400}', 400),
        (HEAD + b"Connection: close\r\n\r\n", 411),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: \xb2\r\n\r\n", 400),
        (HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (HEAD + b"Connection: close\r\nContent-Length: 5000000\r\n\r\n", 413),
        (HEAD + b"Content-Length: " + b"9" * 99 + b"\r\n\r\n", 400),
        (HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n", 400),
        (b"POST /health HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n" + HOST + b"\r\n", 405),
        (b"DELETE /echo HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n", 405),
        (b"GET /nowhere HTTP/1.0\r\n" + HOST + b"\r\n", 404),
        (HEAD.replace(b"echo", b"bad") + b"Connection: close\r\nContent-Length: 0\r\n\r\n", 500),
        (HEAD + b"Connection: close\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, 400),
    ],
)
def test_what_is_wrong_is_replied_in_json_and_the_server_goes_on(make, capfd, raw, status):
    world = make()
    head, _, body = world.send(raw).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status and (status == 200 or json.loads(body)["error"])
    assert world.ask({"a": 1}) == (200, {"a": 1})
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (status == 500)


def test_a_large_body_is_awaited_with_100_continue(make):
    world = make()
    with socket.create_connection(world.server.address, timeout=60) as link:
        link.sendall(HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 8\r\n\r\n")
        assert link.recv(1000).startswith(b"HTTP/1.1 100")
        link.sendall(b'{"a": 1}')
        assert b"".join(iter(lambda: link.recv(1000), b"")).endswith(b'{"a": 1}\n')


def test_a_stream_has_its_parts_in_order_and_an_end(make):
    world = make()
    client = world.connect()
    for _ in range(2):
        client.request("POST", "/stream", json.dumps({"parts": 5}), JSON)
        reply = client.getresponse()
        assert reply.getheader("Content-Type") == "text/event-stream"
        assert reply.read() == b"".join(b"data: %d\n\n" % number for number in range(5))
    raw = json.dumps({"parts": 2}).encode()
    head = HEAD.replace(b"echo", b"stream").replace(b"HTTP/1.1", b"HTTP/1.0")
    plain = world.send(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
    assert plain.endswith(b"\r\n\r\ndata: 0\n\ndata: 1\n\n")


def test_a_client_that_leaves_a_stream_is_noticed_and_others_are_served(make):
    world = make()
    client = world.connect()
    client.request("POST", "/stream", json.dumps({"parts": 100_000, "pause": 0.002}), JSON)
    assert client.getresponse().read(9) == b"data: 0\n\n"
    client.close()
    await_that(lambda: world.gone)
    assert world.ask({"a": 1}) == (200, {"a": 1})
    assert world.stop()


def test_a_client_that_leaves_the_queue_is_not_computed(make):
    world = make()
    world.free.clear()
    first, second = world.connect(), world.connect()
    first.request("POST", "/echo", json.dumps({"first": 1}), JSON)
    await_that(lambda: world.batches)
    second.request("POST", "/echo", json.dumps({"second": 1}), JSON)
    await_that(lambda: world.server.queue.waiting == 2)
    second.close()
    await_that(lambda: world.server.queue.waiting == 1)
    world.free.set()
    assert first.getresponse().status == 200
    assert world.ask({"a": 1})[0] == 200 and {"second": 1} not in sum(world.batches, [])


def test_a_client_that_does_not_read_is_dropped(make):
    world = make()
    world.free.clear()
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.connect(world.server.address)
        raw = json.dumps({"parts": 400, "size": 65536, "pause": 0.002}).encode()
        link.sendall(HEAD.replace(b"echo", b"stream") + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        await_that(lambda: world.batches)
        world.server.queue.limits = Limits(silence_s=0.3)  # not while it sends: it may be late
        world.free.set()
        await_that(lambda: world.gone)
    world.server.queue.limits = Limits()
    assert world.ask({"a": 1})[0] == 200


@pytest.mark.parametrize("raw", [b"", b"POST /ec"])
def test_a_client_that_sends_no_head_is_dropped(make, raw):
    world = make(silence_s=0.2)
    with suppress(ConnectionError):  # dropped before it has sent even that
        assert world.send(raw) == b""
    world.server.queue.limits = Limits()
    assert world.ask({"a": 1})[0] == 200


def test_a_body_that_does_not_arrive_is_not_awaited(make):
    world = make(silence_s=0.2)
    assert b" 408 " in world.send(HEAD + b"Connection: close\r\nContent-Length: 9\r\n\r\n{")
    assert world.ask({"a": 1})[0] == 200


def test_more_requests_than_may_wait_are_refused(make):
    world = make(waiting=2)
    world.free.clear()
    clients = [world.connect() for _ in range(4)]
    clients[0].request("POST", "/echo", "{}", JSON)
    await_that(lambda: world.batches)
    for client in clients[1:3]:
        client.request("POST", "/echo", "{}", JSON)
    await_that(lambda: len(world.server.queue) == 2)
    assert world.ask({}) == (503, {"error": "too many requests are waiting"})
    world.free.set()
    assert [client.getresponse().status for client in clients[:3]] == [200] * 3


def test_silent_connections_keep_nobody_out(make):
    world = make(connections=4, peer_connections=3)
    links = [socket.create_connection(world.server.address, timeout=60) for _ in range(12)]
    assert world.ask({"a": 1}) == (200, {"a": 1})
    assert links[0].recv(10) == b""
    await_that(lambda: len(world.server.listener.connections) <= 3)
    for link in links:
        link.close()


def test_more_connections_at_work_than_allowed_are_refused(make):
    world = make(connections=2, peer_connections=9)
    world.free.clear()
    clients = [world.connect() for _ in range(2)]
    for client in clients:
        client.request("POST", "/echo", "{}", JSON)
    await_that(lambda: world.server.queue.waiting == 2)
    assert world.ask({})[0] == 503
    world.free.set()
    assert [client.getresponse().status for client in clients] == [200, 200]


def test_bodies_that_arrive_at_once_are_bounded_together(make):
    world = make(bodies_bytes=100_000)
    with socket.create_connection(world.server.address, timeout=60) as link:
        link.sendall(HEAD + b"Content-Length: 90000\r\n\r\n{")
        await_that(lambda: world.server.queue.waiting)
        assert world.ask({"a": "x" * 20_000})[0] == 503
        assert world.ask({"a": 1})[0] == 200


# --- pages of other sites, in a browser on the same machine ---


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": socket.gethostname()}, 200),
        ({"Host": "attacker.example"}, 421),
        ({"Host": "127.0.0.1.attacker.example:8000"}, 421),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "http://attacker.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:9000"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_only_requests_that_are_meant_for_this_server_are_read(make, headers, status):
    world = make()
    assert world.ask({}, headers=headers)[0] == status
    assert world.batches == ([[{}]] if status == 200 else [])


def test_a_token_is_asked_for_before_the_body_and_makes_any_name_good(make, monkeypatch):
    monkeypatch.setenv(TOKEN, "much secret")
    world = make()
    head = HEAD + b"Connection: close\r\nContent-Length: 4000000\r\n\r\n"
    assert b" 401 " in world.send(head)
    named = {"Host": "models.example", "Authorization": "Bearer much secret"}
    assert world.ask({}, headers=named)[0] == 200
    assert world.ask({})[0] == 401 and world.ask({}, headers={"Authorization": "Bearer other"})[0] == 401
    assert world.ask({}, headers={"Authorization": "Bearer much secret"}) == (200, {})
    client = world.connect()
    client.request("GET", "/health")
    assert client.getresponse().status == 200


def test_one_bad_request_of_a_batch_fails_alone(capfd):
    def answer(batch):
        return [{"half": 1 / each["number"]} for each in batch]

    server = Server("127.0.0.1", 0, pages={}, routes={"/half": read_json})
    clients = [http.client.HTTPConnection(*server.address, timeout=60) for _ in range(3)]
    for number, client in enumerate(clients):
        client.request("POST", "/half", json.dumps({"number": number}), JSON)
    assert server.serve_batches(lambda: True, answer)
    assert [client.getresponse().status for client in clients] == [500, 200, 200]
    assert "ZeroDivisionError" in capfd.readouterr().err
    for client in clients:
        client.close()


# --- its end ---


def test_a_burst_that_was_not_accepted_when_the_stop_comes_is_answered():
    server = Server("127.0.0.1", 0, pages={}, routes={"/echo": read_json})
    burst = [http.client.HTTPConnection(*server.address, timeout=60) for _ in range(40)]
    for number, client in enumerate(burst):
        client.request("POST", "/echo", json.dumps({"number": number}), JSON)
    assert server.serve_batches(lambda: True, lambda batch: batch, most=3)
    assert [json.loads(client.getresponse().read())["number"] for client in burst] == list(range(40))
    for client in burst:
        client.close()


def test_a_stop_under_load_answers_all_that_was_taken_and_then_accepts_nothing(make):
    world = make()
    world.free.clear()
    clients = [world.connect() for _ in range(9)]
    for number, client in enumerate(clients):
        path = "/stream" if number % 2 else "/echo"
        client.request("POST", path, json.dumps({"parts": 20, "pause": 0.005}), JSON)
    idle = world.connect()
    idle.connect()
    await_that(lambda: world.server.queue.waiting == 9)
    assert world.stop()
    for client in clients:
        reply = client.getresponse()
        assert reply.status == 200 and len(reply.read()) > 20
    assert idle.sock.recv(10) == b""
    with pytest.raises(ConnectionRefusedError):
        world.ask({})


def test_requests_that_are_late_are_refused_in_the_end(make):
    world = make(answer_s=0.3)
    world.most = 1
    world.free.clear()
    clients = [world.connect() for _ in range(8)]
    for client in clients:
        client.request("POST", "/echo", '{"pause": 0.4}', JSON)
    await_that(
        lambda: world.server.queue.waiting == 8 and world.batches
    )  # one is taken: it is answered, however late the others
    assert not world.stop()
    statuses = [client.getresponse().status for client in clients]
    assert set(statuses) == {200, 503}


def test_half_a_request_does_not_keep_the_server(make):
    world = make(silence_s=60.0)
    with socket.create_connection(world.server.address, timeout=60) as link:
        link.sendall(b"POST /echo HTTP/1.1\r\nContent-")
        await_that(lambda: world.server.listener.connections)
        assert world.stop()
        assert link.recv(10) == b""


def test_a_model_that_is_busy_when_the_connections_have_ended_ends_too():
    server = Server("127.0.0.1", 0, pages={}, routes={"/echo": read_json})
    busy_s = iter([0.0, 1.5])
    thread = threading.Thread(
        target=server.serve,
        args=(iter([False, True]).__next__, lambda wait_s: time.sleep(next(busy_s, 0.0))),
        daemon=True,
    )
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
