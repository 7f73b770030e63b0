"""One process of a service in three roles: prefill reads a prompt, decode continues it, the proxy passes requests on.

A stand-in for engines such as vLLM that needs only Python. The proxy finds the others in ASCENDRUN_ROLES. With
--requests it sends itself that many prompts and exits with 0, which ends the job.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROLE = os.environ["ASCENDRUN_ROLE"]
ADDRESSES = json.loads(os.environ["ASCENDRUN_ROLES"])
WAIT_S = 60.0
_turns = {role: itertools.cycle(addresses) for role, addresses in ADDRESSES.items()}


def say(line):
    sys.stdout.write(f"{line}\n")  # one write: several threads print
    sys.stdout.flush()


def port_of(role):
    return int(os.environ[f"{role.upper()}_PORT"])


def ask(role, value):
    """Return the reply of the next node of a role, which may still be starting."""
    address = next(_turns[role])
    host = f"[{address}]" if ":" in address else address
    request = urllib.request.Request(f"http://{host}:{port_of(role)}/", json.dumps(value).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with opener.open(request, timeout=WAIT_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def reply_to(value):
    if ROLE == "prefill":
        return {"tokens": value["prompt"].split()}
    if ROLE == "decode":
        return {"text": " ".join(reversed(value["tokens"]))}
    return ask("decode", ask("prefill", value))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(reply_to(value)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        say(f"{ROLE} answered {value}")

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int)
    count = parser.parse_args().requests
    server = ThreadingHTTPServer(("", port_of(ROLE)), Handler)
    say(f"{ROLE} listens on port {port_of(ROLE)}")
    if count is None:
        server.serve_forever()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for number in range(count):
        say(f"text {number} " + ask("proxy", {"prompt": f"request {number} of the client"})["text"])


if __name__ == "__main__":
    main()
