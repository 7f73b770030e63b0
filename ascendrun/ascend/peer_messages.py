"""Lines of HCCL, NCCL, gloo and torch about other ranks: which rank is reported, waited for or lost.

read_messages("... Connection closed by peer [10.0.0.3]:41022")    a "lost" message about 10.0.0.3
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache, lru_cache
from re import Match, Pattern
from typing import Callable, Optional

from ascendrun.ascend.line_shapes import SHAPES_KEPT, shape_of
from ascendrun.core.dataclass import dataclass

LOST, CONNECT, EXEC = "lost", "connect", "exec"
"""Of `PeerMessage.wait`: a connection broke; a connection was never established; a collective did not complete."""

Addresses = tuple[tuple[str, Optional[int]], ...]


@dataclass(frozen=True)
class PeerMessage:
    """The message of one line. `wait`: how other ranks affected its rank, None: it only reports about them.

    `ranks`: named by number; `addresses`: named by (address, device or None); `kind`: the kind of message.
    """

    kind: str
    wait: str | None = None
    ranks: tuple[int, ...] = ()
    addresses: Addresses = ()
    values: Mapping[str, str] = field(default_factory=dict)


Maker = Callable[[Match[str]], PeerMessage]
_Row = tuple[tuple[str, ...], Pattern[str], Maker]
_rows: list[_Row] = []


def read_messages(text: str) -> Iterator[PeerMessage]:
    """Yield the messages of a line, HCCL's first; usually there is none or one."""
    for needles, pattern, maker in _rows_by_shape(shape_of(text)):
        if any(needle in text for needle in needles):
            found = pattern.search(text)
            if found is not None:
                yield maker(found)


@lru_cache(SHAPES_KEPT)
def _rows_by_shape(shape: str) -> Sequence[_Row]:
    """Return the rows that lines of a shape may match. One search is enough for most shapes, which match none."""
    if _any_needle().search(shape) is None:
        return ()
    return [row for row in _rows if any(shape_of(needle) in shape for needle in row[0])]


@cache
def _any_needle() -> Pattern[str]:
    return re.compile("|".join(sorted({re.escape(shape_of(needle)) for needles, _, _ in _rows for needle in needles})))


def _message(needles: Sequence[str], pattern: str) -> Callable[[Maker], Maker]:
    """Register a maker for lines that contain one of `needles` and match `pattern`."""

    def register(maker: Maker) -> Maker:
        _rows.append((tuple(needles), re.compile(pattern), maker))
        return maker

    return register


def _add(kind: str, needles: Sequence[str], pattern: str, wait: str | None = None, **values: str) -> None:
    """Add a row. Named groups `rank`, `ranks`, `ip` and `dev` of the pattern set ranks and addresses; all other groups
    are values, "" where they did not match. `values`: more values."""

    def make(found: Match[str]) -> PeerMessage:
        groups = {name: text or "" for name, text in found.groupdict().items()}
        ranks = re.findall(r"\d+", groups.pop("ranks", "") or groups.pop("rank", ""))
        address, device = groups.pop("ip", ""), groups.pop("dev", None)
        address = address if device is None else address.partition("%")[0]  # without its scope
        addresses = ((address, _device_of(device)),) if address else ()
        return PeerMessage(kind, wait, tuple(map(int, ranks)), addresses, {**groups, **values})

    _message(needles, pattern)(make)


def _device_of(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


IP = r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]+)"
NAME = r"[A-Za-z0-9_.-]*[A-Za-z0-9]"
_PLACE = re.compile(
    r"(?<!addr=)[\[('](?P<place>[\w.:-]+?)(?:%\w+)?(?:\]:|', |, | : |\]: ?)\d+|\[(?P<ip>" + IP + r")\]|"
    r"\b(?:host|to|server) '?(?P<named>" + NAME + r")'?(?: port |:)\d+|\b(?P<bare>\d{1,3}(?:\.\d{1,3}){3})\b"
)


def _addresses_in(text: str) -> Addresses:
    """Return hosts and addresses, none with a device."""
    return tuple((str(place[place.lastgroup or 0]), None) for place in _PLACE.finditer(text))


# ---------------------------------------------------------------- HCCL


_add(
    "location",
    ["Exception Location"],
    r"Cluster Exception Location\[IP/ID\]:\s*\[(?P<ip>[^/\]]+)/(?P<dev>\d+)\].*?ExceptionType:\[(?P<type>[^\]]+)\]",
)
_add("location", ["crimer rank"], r"crimer rank \[(?P<ip>[^/\]]+)/(?P<dev>\d+)\] status\[(?P<type>\w+)\]")
_add(
    "missing",
    ["Failed to connect agent[", "connectFailedAgentIdList["],
    r"(?:Failed to connect agent|connectFailedAgentIdList)\[(?P<ranks>[\d, ]+)\]",
    CONNECT,
)
_add("connected", ["connected rankinfo"], r"connected rankinfo\[LINE \d+\]:(?P<ranks>[\s\[\]\d,]+)")
_add("needed", ["need connect rankNum"], r"need connect rankNum is \[(?P<count>\d+)\]")
_add(
    "link",
    ["client", "server"],
    r"\|\s*(?P<ip>" + IP + r")\((?P<rank>\d+)\)\s*\|(?:\s*\d+\s*\|)?"
    r"\s*" + IP + r"\((?P<from>\d+)\)\s*\|(?:\s*\d+\s*\|)?\s*(?:client|server)"
    r"\s*\|\s*(?P<status>[^|]+?)\s*(?:\||$)(?:\s*(?P<tls>\w+)\s*\|)?",
    CONNECT,
)


@_message(
    ["createLink para"],
    r"createLink para:rank\[\d+\]-localUserrank\[(?P<l>\d+)\]-localIpAddr\[(?P<lip>[^\]]*)\], "
    r"(?:remoteRank|dst_rank)\[\d+\]-remoteUserrank\[(?P<r>\d+)\]-"
    r"remote(?:IpAddr|_ip_addr)\[(?P<rip>[^\]]*)\]",
)
def _transport(found: Match[str]) -> PeerMessage:
    address, _, device = found["rip"].partition("/")
    wait = None if "Create Dest error" in found.string else CONNECT
    ranks = (int(found["r"]),)
    values = {"from": found["l"], "status": "", "tls": ""}
    return PeerMessage("link", wait=wait, ranks=ranks, addresses=((address, _device_of(device)),), values=values)


_add(
    "link",
    ["fails to connect to dstRank"],
    r"fails to connect to dstRank \(server (?P<ip>[^,]+), device ID (?P<dev>\d+)\)",
    CONNECT,
    **{"from": "", "status": "detected", "tls": ""},
)
_add(
    "tls",
    ["rankList for enabled tls"],
    r"rankList for enabled tls:(?P<on>.*?)rankList for disabled tls:"
    r"(?P<off>.*?)(?:rankList for query|$)",
)
_add("tls", ["EI0016", "tlsStatus are inconsistent"], r"EI0016|tlsStatus are inconsistent", on="", off="")


@_message(
    ["cqe err", "cqe error"],
    r"cqe err(?:or)? status\[(?P<status>\d+)\].*?(?:remoteIP\{server\[(?P<rs>[^\]]+)\],"
    r"deviceId\[(?P<rd>[^\]]*)\](?:,deviceIp\[(?P<rip>[^\]]+)\])?|ip:\[(?P<ip>[^\]]+)\])",
)
def _cqe(found: Match[str]) -> PeerMessage:
    named = ((found["rip"], None), (found["rs"], _device_of(found["rd"])), (found["ip"], None))
    addresses = [(address.partition("%")[0], device) for address, device in named if address]
    return PeerMessage("cqe", addresses=tuple(addresses), values={"status": found["status"]})


_add("cqe", ["CQE"], r"EI0013.*?Peer information: server (?P<ip>[^,]+), device ID (?P<dev>\d+)", status="12")


@_message(
    ["EI0005", "check fail. local[", "communication are inconsistent between ranks"],
    r"(?:EI0005|CMD information (?P<field>\w+) check fail|communication are inconsistent between ranks)"
    r"(?:.*?parameter (?P<parameter>\w+))?(?:.*?\blocal(?: end )?\[?(?P<own>[^\],]+))?",
)
def _differs(found: Match[str]) -> PeerMessage:
    """Make the message; `values`: the rank's value of the parameter that differs."""
    parameter, own = found["field"] or found["parameter"], found["own"]
    return PeerMessage("differs", values={parameter or "value": own.strip()} if own else {})


_add(
    "tag",
    ["Task run failed, base information", "base information: "],
    r"(?:Task run failed, base information|base information: ).*?tag\[(?P<tag>[A-Za-z]+)_?(?P<group>[^\]]*)\]",
)
_add(
    "members",
    ["groupRank information"],
    r"groupRank information is group:\[(?P<group>[^\]]+)\].*?rankSize\[(?P<size>\d+)\]",
)
_add("index", ["opData information"], r"opData information is .*?index\[(?P<index>\d+)\]")
_IN_GROUP = r"(?:.*?rankSize\[(?P<size>\d+)\], ?rankId\[(?P<member>\d+))?"
"""How many ranks the group has, and the number of this rank in it: that of the remote rank is one of these."""
_add("remote", ["remote rank:["], r"remote rank:\[(?P<rank>\d+)\]" + _IN_GROUP)
_add("remote", ["from remote rank"], r"from remote rank:? ?\[(?P<rank>\d+)\]" + _IN_GROUP, EXEC)
_add(
    "timeout",
    ["EI0002", "Notify register", "notify wait timeout", "Notify Wait", "[TaskExecStage][Timeout]"],
    r"EI0002|wait execution of the Notify register times out|notify wait timeout|taskType\[Notify Wait\]|"
    r"\[TaskExecStage\]\[Timeout\]",
    EXEC,
)
_add(
    "timeout",
    ["EI0006", "socket time", "socket establish timeout", "link establish"],
    r"EI0006|[Gg]et(?:ting)? socket time(?:s )?out|wait socket establish timeout",
    CONNECT,
)


@_message(
    ["EI0015", "topo exchange", "TopoExchangeAgent"],
    r"EI0015|topo exchange (?:server|agent) get socket timeout|TopoExchangeAgent: connect server\[[^\]]+\] failed",
)
def _meeting_timeout(found: Match[str]) -> PeerMessage:
    is_server = "exchange server" in found.group()  # it lists clients, so it was listening
    return PeerMessage("clients" if is_server else "timeout", wait=CONNECT)


# ---------------------------------------------------------------- process groups of torch: store, gloo, NCCL


_add(
    "completion",
    ["Got completion from peer"],
    r"Got completion from peer (?P<ip>[^<\s]+)<\d+> with status=(?P<status>\d+)",
    LOST,
)


_GROUP = r"(?:\[PG (?:ID \d+ PG GUID )?(?P<group>[^\]]*?) Rank \d+\].*?)?"
_OF_EQUAL_SIZES = frozenset(
    "ALLREDUCE BROADCAST REDUCE ALLGATHER _ALLGATHER_BASE REDUCE_SCATTER _REDUCE_SCATTER_BASE".split()
)
"""Collectives that every rank of a group calls with equal numbers of elements."""


@_message(
    ["Watchdog caught collective operation timeout", "WorkNCCL(", "WorkHCCL("],
    _GROUP + r"(?:(?:\[Rank (?P<by>\d+)\] )?Watchdog caught collective operation timeout:|^(?=\s*Work[NH]CCL\())"
    r"(?:\s*\w+\((?:.*?SeqNum=(?P<seq>\d+))?(?:.*?OpType=(?P<op>\w+))?"
    r"(?:.*?NumelIn=(?P<in>\d+), NumelOut=(?P<out>\d+))?(?:.*?Timeout\(ms\)=(?P<ms>\d+))?)?",
)
def _watchdog(found: Match[str]) -> PeerMessage:
    """Make the message; `values`: of the call, with the rank that reports it (`by`) and the limit (`ms`)."""
    names = ("seq", "op", "group", "by", "ms", *(("in", "out") if found["op"] in _OF_EQUAL_SIZES else ()))
    values = {name: found[name] for name in names if found[name]}
    values.update({"elements": found["in"]} if found["in"] else {})
    return PeerMessage("sequence" if "seq" in values else "timeout", wait=EXEC, values=values)


_add(
    "called",
    ["opCount "],
    r"NCCL INFO (?P<op>AllReduce|Broadcast|Reduce|AllGather|ReduceScatter): opCount (?P<seq>[0-9a-f]+) .*?\bcount "
    r"(?P<in>\d+) .*?\bcomm (?P<comm>\w+) \[nranks=(?P<size>\d+)\]",
)
_add(
    "progress",
    ["ast enqueued"],
    _GROUP
    + r"[Ll]ast enqueued (?:NCCL |HCCL )?work: (?P<enqueued>\d+), last completed (?:[NH]CCL )?work: (?P<completed>\d+)",
)
_add("timeout", ["dump signal"], r"dump signal due to a collective timeout from +this local rank", EXEC)
_add("signalled", ["dump signal"], r"dump signal (?:due to a collective timeout )?from +(?:another )?rank", EXEC)
_add("stuck", ["watchdog got stuck"], r"ProcessGroup\w+'s watchdog got stuck for \d+ seconds", EXEC)
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


_add(
    "mismatch",
    ["op.preamble.length <= op.nbytes", "essage truncated : rece"],
    r"op\.preamble\.length <= op\.nbytes|[Mm]essage truncated : rece(?:iving|ived) \d+ bytes instead of \d+",
)
_add(
    "models",
    ["DDP expects same model across all ranks"],
    r"but Rank (?P<rank>\d+) has (?P<own>\d+) params, while rank \d+ has inconsistent (?P<theirs>\d+)",
)
_add(
    "lagging",
    ["t join collective #"],
    r"\[(?P<ranks>[\d, ]+)\] finished collective #(?P<index>\d+), but didn't join collective #(?P<others>\d+)",
)
_add("missing", ["They never joined any collectives"], r"ranks \[(?P<ranks>[\d, ]+)\] are the lagging ranks", EXEC)
_add("missing", ["wait timeout after"], r"wait timeout after \d+ms, keys: \S*/rank_(?P<rank>\d+)\b", EXEC)
_add(
    "missing",
    ["failed to pass monitoredBarrier"],
    r"[Rr]anks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier",
    EXEC,
)
_LIST = r"(?: ?[:=]| are| is)? ?[\"']?[\[({]?(?P<ranks>\d+(?:(?:, ?(?:and )?| and )\d+)*)(?![-.:\w])"
_NOT = r"(?:did not|didn't|have not|haven't|never|are not|were not|not)(?: yet)? "
_LATE = r"(?:join|connect|arriv|check|report|enter|appear|regist)\w*"
_add("missing", ["iting for ranks", "iting on ranks"], r"[Ww]aiting (?:for|on) ranks" + _LIST, EXEC)
_add("missing", ["anks "], r"\b[Rr]anks" + _LIST + r"[\])}]? " + _NOT + _LATE, EXEC)
_add(
    "missing", ["UniqueId from ["], r"retrieving \w+UniqueId from \[(?P<rank>\d+)\].{0,200}(?i:timeout|timed out)", EXEC
)
_add(
    "missing",
    ["issing ranks", "bsent ranks", "ed ranks", "anks not", "anks that", "anks which"],
    r"\b(?:(?:[Mm]issing|[Aa]bsent|[Uu]nconnected|not (?:yet )?(?:connected|joined)) ranks|"
    r"[Rr]anks (?:(?:that|which) )?(?:(?:are )?(?:missing|absent)|" + _NOT + _LATE + r"))" + _LIST,
    EXEC,
)


@_message(
    ["joined", "worker_count"],
    r"(?P<joined>\d+)(?:/| of )(?P<all>\d+) (?:clients|nodes|hosts|workers|processes|ranks) (?:have )?joined|"
    r"world_size=(?P<size>\d+), worker_count=(?P<count>\d+)",
)
def _store_missing(found: Match[str]) -> PeerMessage:
    values = {"joined": found["joined"] or found["count"], "expected": found["all"] or found["size"]}
    return PeerMessage("clients", wait=CONNECT, values=values)


@_message(
    ["o route to host", "Host is down", "etwork is unreachable", "onnection timed out", "(gai error: "],
    r"^(?!.*\bibv_).*?(?:(?P<no_route>[Nn]o route to host|Host is down)|(?P<no_network>[Nn]etwork is unreachable)|"
    r"(?P<no_answer>[Cc]onnection timed out)|\(gai error: -?\d+ - (?P<no_name>[\w ]+))",
)
def _unreached(found: Match[str]) -> PeerMessage:
    why = str(found.lastgroup)
    wait = None if why == "no_name" else CONNECT
    values = {"why": why, "reason": found[why], "meeting": _MEETING.search(found.string) and "yes" or ""}
    return PeerMessage("unreached", wait=wait, addresses=_addresses_in(found.string), values=values)


_add(
    "tried",
    ["client socket has failed to connect to ["],
    r"client socket has failed to connect to \[(?P<ip>[^\]]+)\]:\d+ \(errno: ?111\b",
)


@_message(
    ["while trying to connect to (", "TopoExchangeAgent: connect server["],
    r"timed out after \d+m?s while trying to connect to \(|TopoExchangeAgent: connect server\[[^\]]+\] failed",
)
def _unreached_in_time(found: Match[str]) -> PeerMessage:
    values = {"why": "in_vain", "reason": "timed out", "meeting": "yes"}
    return PeerMessage("unreached", wait=CONNECT, addresses=_addresses_in(found.string), values=values)


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


_add("lost", [", remote=["], r"gloo/transport/tcp/pair\.cc:\d+\] no error.*?, remote=\[(?P<ip>[^\]]+)\]:\d+", CONNECT)
_add(
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


_add(
    "thrown",
    ["terminate called"],
    r"terminate called after throwing an instance of '(?:gloo::|c10::Dist|c10d::|torch::distributed)",
    LOST,
)
