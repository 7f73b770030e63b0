"""ForceCommand of a hostile host: runs what the head asks for, and changes what the agent sends as /root/mode has it.

{"mode": NAME, "other": run id of another job}; without the file nothing is changed. Each change is a byte of
/root/changed. Standard library only.
"""

import json
import os
import struct
import subprocess
import sys

MAGIC = b"\nASCENDRUN-AGENT 1\n"
LENGTHS = struct.Struct("!II")


def forged(event, **fields):
    return (json.dumps({"event": event, "seq": 1 << 40, "at_ns": 1, **fields}) + "\n").encode()


def on_data(**fields):
    """Change fields of what is sent of files."""
    return lambda header, body, other: [({**header, **fields}, body)] if header.get("event") == "data" else None


def inject(line):
    """Append a line to the attempt's records."""

    def change(header, body, other):
        if header.get("event") != "data" or not header["file"].startswith("rank-"):
            return None
        end = ENDS.get((header["tag"], "events", 0), 0)
        ENDS[header["tag"], "events", 0] = end + len(line)
        record = {"event": "data", "tag": header["tag"], "file": "events", "generation": 0, "offset": end}
        return [(header, body), (record, line)]

    return change


def swap(header, body, other):
    HELD.append((header, body))
    if len(HELD) < 3:
        return []
    held = HELD[::-1]
    HELD.clear()
    return held


def reply(**fields):
    return lambda header, body, other: [({**header, **fields}, body)] if "re" in header else None


ENDS, HELD = {}, []
UP = "../../../../../../../../tmp/pwned"
EXIT = {"rank": 0, "code": 3, "signal": None, "stopped": False, "status": 768}
MODES = {
    "other-job": lambda h, b, other: [({**h, "tag": other}, b)] if h.get("event") == "data" else None,
    "other-attempt": lambda h, b, other: [({**h, "tag": h["tag"][:-1] + "2"}, b)] if h.get("event") == "data" else None,
    "other-host": on_data(host="node1", hostname="node1", file="rank-0.out", offset=0),
    "future": on_data(generation=10**9, offset=1 << 62),
    "negative": on_data(generation=-1, offset=-1),
    "wrong-types": on_data(generation=[1], offset={"a": 1}, tag=None),
    "huge": lambda h, b, other: [(h, b + b"x" * (3 << 20))] if h.get("event") == "data" else None,
    "path-up": on_data(file=UP),
    "path-absolute": on_data(file="/tmp/pwned"),
    "not-utf8": lambda h, b, other: [(b"\xff\xfe{\x80}", b"")],
    "no-object": lambda h, b, other: [(b"[1]", b"")],
    "flood": lambda h, b, other: [({"event": "beat"}, b"")] * 20000,
    "repeated": lambda h, b, other: [(h, b)] * 3,
    "unasked": lambda h, b, other: (
        [({"re": number, "ok": True}, b"") for number in (10**30, "1", True, None, -1)] + [(h, b)]
    ),
    "escapes": lambda h, b, other: [(h, b"\x1b]0;pwned\x07\x1b[2J" + b[11:])] if len(b) > 11 else None,
    "ended-live": inject(forged("ended", codes={"2": 0, "3": 0}, exits={}, leftovers=[])),
    "other-rank": inject(forged("rank_exited", **EXIT)),
    "live-ended": reply(live=[], processes=[], phase="ended", supervisor=None, files={}),
    "wrong-hash": reply(sha256="0" * 64),
    "reordered": swap,
}


def change(header, body):
    try:
        with open("/root/mode") as file:
            wish = json.load(file)
    except (OSError, ValueError):
        return [(header, body)]
    changed = MODES[wish["mode"]](header, body, wish["other"])
    if changed is None:
        return [(header, body)]
    with open("/root/changed", "ab") as file:
        file.write(b".")
    return changed


def packed(header, body):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def main():
    child = subprocess.Popen(["/bin/sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdout=subprocess.PIPE, bufsize=0)
    data, is_agent = b"", False
    while True:
        more = os.read(child.stdout.fileno(), 1 << 18)
        data += more
        if not is_agent:
            is_agent = MAGIC in data
            os.write(1, data[: data.index(MAGIC) + len(MAGIC)] if is_agent else data)
            data = data[data.index(MAGIC) + len(MAGIC) :] if is_agent else b""
        while is_agent and len(data) >= 8 and len(data) >= 8 + sum(LENGTHS.unpack(data[:8])):
            head, size = LENGTHS.unpack(data[:8])
            header, body, data = (
                json.loads(data[8 : 8 + head]),
                data[8 + head : 8 + head + size],
                data[8 + head + size :],
            )
            if header.get("event") == "data":
                ENDS[header["tag"], header["file"], header["generation"]] = header["offset"] + len(body)
            send(b"".join(packed(*frame) for frame in change(header, body)))
        if not more:
            sys.exit(child.wait())


def send(data):
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
