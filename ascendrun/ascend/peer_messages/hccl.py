"""HCCL's messages about other ranks: reported as failed, missing, or waited for."""

from __future__ import annotations

from re import Match

from ascendrun.ascend.peer_messages.message import CONNECT, EXEC, IP, MessageTable, PeerMessage, device_of, server_of

TABLE = MessageTable()
_message = TABLE.row


TABLE.add(
    "location",
    ["Exception Location"],
    r"Cluster Exception Location\[IP/ID\]:\s*\[(?P<ip>[^/\]]+)/(?P<dev>\d+)\]"
    r".*?ExceptionType:\[(?P<type>[^\]]+)\]",
)
TABLE.add("location", ["crimer rank"], r"crimer rank \[(?P<ip>[^/\]]+)/(?P<dev>\d+)\] status\[(?P<type>\w+)\]")
TABLE.add("missing", ["Failed to connect agent["], r"Failed to connect agent\[(?P<ranks>[\d, ]+)\]", CONNECT)
TABLE.add("connected", ["connected rankinfo"], r"connected rankinfo\[LINE \d+\]:(?P<ranks>[\s\[\]\d,]+)")
TABLE.add("needed", ["need connect rankNum"], r"need connect rankNum is \[(?P<count>\d+)\]")
TABLE.add(
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
    return PeerMessage("link", wait=wait, ranks=ranks, addresses=((address, device_of(device)),), values=values)


TABLE.add(
    "link",
    ["fails to connect to dstRank"],
    r"fails to connect to dstRank \(server (?P<ip>[^,]+), device ID (?P<dev>\d+)\)",
    CONNECT,
    **{"from": "", "status": "detected", "tls": ""},
)
TABLE.add(
    "tls",
    ["rankList for enabled tls"],
    r"rankList for enabled tls:(?P<on>.*?)rankList for disabled tls:"
    r"(?P<off>.*?)(?:rankList for query|$)",
)
TABLE.add("tls", ["EI0016", "tlsStatus are inconsistent"], r"EI0016|tlsStatus are inconsistent", on="", off="")


@_message(
    ["cqe err", "cqe error"],
    r"cqe err(?:or)? status\[(?P<status>\d+)\].*?(?:remoteIP\{server\[(?P<rs>[^\]]+)\],"
    r"deviceId\[(?P<rd>[^\]]*)\](?:,deviceIp\[(?P<rip>[^\]]+)\])?|ip:\[(?P<ip>[^\]]+)\])",
)
def _cqe(found: Match[str]) -> PeerMessage:
    named = ((found["rip"], None), (found["rs"], device_of(found["rd"])), (found["ip"], None))
    addresses = [(server_of(address), device) for address, device in named if address]
    return PeerMessage("cqe", addresses=tuple(addresses), values={"status": found["status"]})


TABLE.add("cqe", ["CQE"], r"EI0013.*?Peer information: server (?P<ip>[^,]+), device ID (?P<dev>\d+)", status="12")


@_message(
    ["EI0005", "check fail. local[", "inconsistent between ranks"],
    r"(?:EI0005|CMD information (?P<field>\w+) check fail|inconsistent between ranks)"
    r"(?:.*?parameter (?P<parameter>\w+))?(?:.*?\blocal(?: end )?\[?(?P<own>[^\],]+))?",
)
def _differs(found: Match[str]) -> PeerMessage:
    """Make the message; `values`: the rank's value of the parameter that differs."""
    parameter, own = found["field"] or found["parameter"], found["own"]
    return PeerMessage("differs", values={parameter or "value": own.strip()} if own else {})


TABLE.add(
    "tag",
    ["Task run failed, base information", "base information: "],
    r"(?:Task run failed, base information|base information: ).*?tag\[(?P<tag>[A-Za-z]+)_?(?P<group>[^\]]*)\]",
)
TABLE.add("index", ["opData information"], r"opData information is .*?index\[(?P<index>\d+)\]")
TABLE.add("remote", ["remote rank:["], r"remote rank:\[(?P<rank>\d+)\]")
TABLE.add("remote", ["from remote rank"], r"from remote rank:? ?\[(?P<rank>\d+)\]", EXEC)
TABLE.add(
    "timeout",
    ["EI0002", "Notify register", "notify wait timeout", "Notify Wait", "[TaskExecStage][Timeout]"],
    r"EI0002|wait execution of the Notify register times out|notify wait timeout|taskType\[Notify Wait\]|"
    r"\[TaskExecStage\]\[Timeout\]",
    EXEC,
)
TABLE.add(
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
