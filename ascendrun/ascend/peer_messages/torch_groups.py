"""Messages of torch's process groups about other ranks: its store, gloo, NCCL."""

from __future__ import annotations

import re
from re import Match

from ascendrun.ascend.peer_messages.message import CONNECT, EXEC, LOST, MessageTable, PeerMessage, addresses_in

TABLE = MessageTable()
_message = TABLE.row


TABLE.add(
    "completion",
    ["Got completion from peer"],
    r"Got completion from peer (?P<ip>[^<\s]+)<\d+> with status=(?P<status>\d+)",
    LOST,
)


@_message(
    ["Watchdog caught collective operation timeout"],
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: \w+\("
    r"(?:.*?SeqNum=(?P<seq>\d+))?(?:.*?OpType=(?P<op>\w+))?",
)
def _watchdog(found: Match[str]) -> PeerMessage:
    values = {name: found[name] for name in ("seq", "op") if found[name]}
    return PeerMessage("sequence" if "seq" in values else "timeout", wait=EXEC, values=values)


TABLE.add("stuck", ["watchdog got stuck"], r"ProcessGroup\w+'s watchdog got stuck for \d+ seconds", EXEC)
_PRINT = (
    r"CollectiveFingerPrint\((?:SequenceNumber=(?P<number%d>\d+)(?:, )?)?OpType=(?P<op%d>\w+)"
    r"(?:, TensorShape=\[(?P<shape%d>[^\]]*)\], TensorDtypes=(?P<type%d>\w+))?"
)
_MISMATCH = (
    r"mismatch between collectives on ranks\. Rank (?P<rank>\d+) is running (?:inconsistent )?collective: "
    + _PRINT % (1, 1, 1, 1)
)


def _aspects(found: Match[str], of: int) -> dict[str, str]:
    """Return a collective's aspects, its sequence number last: ranks that call another one keep counting."""
    names = ("op", "shape", "type", "number")
    return {name: found[f"{name}{of}"] for name in names if found[f"{name}{of}"] is not None}


@_message(["Detected mismatch between collectives"], _MISMATCH)
def _mismatch(found: Match[str]) -> PeerMessage:
    """Make the message; `ranks`: its number in the group; `values`: its collective."""
    return PeerMessage("mismatch", ranks=(int(found["rank"]),), values=_aspects(found, 1))


@_message(
    ["Detected mismatch between collectives"],
    _MISMATCH + r".*?but Rank (?P<other>\d+) is running collective: " + _PRINT % (2, 2, 2, 2),
)
def _mismatch_elsewhere(found: Match[str]) -> PeerMessage:
    """Make the message; `ranks`: its number and the other's; `values`: the other's collective."""
    return PeerMessage("mismatch-elsewhere", ranks=(int(found["rank"]), int(found["other"])), values=_aspects(found, 2))


TABLE.add(
    "mismatch",
    ["op.preamble.length <= op.nbytes", "essage truncated : rece"],
    r"op\.preamble\.length <= op\.nbytes|[Mm]essage truncated : rece(?:iving|ived) \d+ bytes instead of \d+",
)
TABLE.add(
    "models",
    ["DDP expects same model across all ranks"],
    r"but Rank (?P<rank>\d+) has (?P<own>\d+) params, while rank \d+ has inconsistent (?P<theirs>\d+)",
)
TABLE.add(
    "lagging",
    ["t join collective #"],
    r"\[(?P<ranks>[\d, ]+)\] finished collective #(?P<index>\d+), but didn't join collective #(?P<others>\d+)",
)
TABLE.add("missing", ["They never joined any collectives"], r"ranks \[(?P<ranks>[\d, ]+)\] are the lagging ranks", EXEC)
TABLE.add(
    "missing",
    ["failed to pass monitoredBarrier"],
    r"[Rr]anks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier",
    EXEC,
)


@_message(
    ["joined", "worker_count"],
    r"(?P<joined>\d+)/(?P<all>\d+) clients joined|"
    r"world_size=(?P<size>\d+), worker_count=(?P<count>\d+)",
)
def _store_missing(found: Match[str]) -> PeerMessage:
    values = {"joined": found["joined"] or found["count"], "expected": found["all"] or found["size"]}
    return PeerMessage("clients", wait=CONNECT, values=values)


@_message(
    ["o route to host", "Host is down", "etwork is unreachable", "onnection timed out", "(gai error: "],
    r"(?P<no_route>[Nn]o route to host|Host is down)|(?P<no_network>[Nn]etwork is unreachable)|"
    r"(?P<no_answer>[Cc]onnection timed out)|\(gai error: -?\d+ - (?P<no_name>[\w ]+)",
)
def _unreached(found: Match[str]) -> PeerMessage:
    why = str(found.lastgroup)
    wait = None if why == "no_name" else CONNECT
    values = {"why": why, "reason": found[why], "meeting": _MEETING.search(found.string) and "yes" or ""}
    return PeerMessage("unreached", wait=wait, addresses=addresses_in(found.string), values=values)


TABLE.add(
    "tried",
    ["client socket has failed to connect to ["],
    r"client socket has failed to connect to \[(?P<ip>[^\]]+)\]:\d+ \(errno: ?111\b",
)


@_message(
    ["while trying to connect to (", "TopoExchangeAgent: connect server["],
    r"timed out after \d+ms while trying to connect to \(|TopoExchangeAgent: connect server\[[^\]]+\] failed",
)
def _unreached_in_time(found: Match[str]) -> PeerMessage:
    values = {"why": "in_vain", "reason": "timed out", "meeting": "yes"}
    return PeerMessage("unreached", wait=CONNECT, addresses=addresses_in(found.string), values=values)


_MEETING = re.compile(r"c10d|gloo|TCPStore|socket\.cpp|hccl|HCCL|NCCL")
"""Such a line is about the job's ranks, whatever name or address it has."""


@_message(
    [
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Connection refused",
        "pair closure",
        "Software caused connection abort",
    ],
    r"(?:gloo|pair\.cc|TCPStore|SocketImpl|socket\.cpp|\[c10d\]).*?(?:\bconnect \[(?P<ip0>[^\]]+)\]:\d+: )?"
    r"(?:Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|pair closure|"
    r"connection abort)"
    r"(?:(?:, remote=|[ :]*)\[(?P<ip>[^\]]+)\](?::\d+)?)?|(?:Read|Write) error \[(?P<ip2>[^\]]+)\]:\d+",
)
def _lost(found: Match[str]) -> PeerMessage:
    address = found["ip0"] or found["ip"] or found["ip2"]
    return PeerMessage("lost", wait=LOST, addresses=((address, None),) if address else ())


TABLE.add(
    "lost", [", remote=["], r"gloo/transport/tcp/pair\.cc:\d+\] no error.*?, remote=\[(?P<ip>[^\]]+)\]:\d+", CONNECT
)
TABLE.add(
    "lost",
    ["Connection closed by peer", "Connection reset by peer"],
    r"Connection (?:closed|reset) by peer \[(?P<ip>[^\]]+)\]",
    LOST,
)


@_message(
    [
        "ncclRemoteError",
        "remote process exited",
        "NCCL communicator was aborted",
        "failed to recv, got 0 bytes",
        "recvValue failed",
        "sendBytes failed",
        "recvBytes failed",
        'Failed to check the "should dump"',
        "process group has been aborted",
        "Timed out waiting",
        "Socket Timeout",
        "wait timeout after",
        "Connection was likely closed",
        "client socket has timed out",
        "client socket has failed to connect",
    ],
    r"ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted|"
    r"failed to recv, got 0 bytes|(?:recvValue|sendBytes|recvBytes) failed|Failed to check the .should dump|"
    r"process group has been aborted|Timed out waiting \d+ms for (?:recv|send) operation|Socket Timeout|"
    r"wait timeout after \d+|Connection was likely closed\. Did the remote server|"
    r"client socket has (?:timed out|failed to connect)",
)
def _lost_quietly(found: Match[str]) -> PeerMessage:
    is_wait = any(word in found.group() for word in ("imed out", "imeout", "failed to connect"))
    return PeerMessage("timeout" if is_wait else "lost", wait=EXEC if is_wait else LOST)


TABLE.add(
    "lost",
    ["terminate called"],
    r"terminate called after throwing an instance of '(?:gloo::|c10::Dist|c10d::|torch::distributed)",
    LOST,
)
