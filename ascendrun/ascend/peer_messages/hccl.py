"""HCCL's words about other ranks: whom it accuses, who is missing, whom it waited for."""

from __future__ import annotations

from re import Match

from ascendrun.ascend.peer_messages.message import CONNECT, EXEC, IP, MessageTable, PeerMessage, numbers_in

TABLE = MessageTable()
_message = TABLE.row


def _server(text: str) -> str:
    return text.partition("%")[0]


def _device(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


@_message(
    ["Exception Location"],
    r"Cluster Exception Location\[IP/ID\]:\s*\[(?P<ip>[^/\]]+)/(?P<dev>\d+)\]"
    r".*?ExceptionType:\[(?P<type>[^\]]+)\]",
)
def _location(found: Match[str]) -> PeerMessage:
    return PeerMessage(
        "location", addresses=((_server(found["ip"]), _device(found["dev"])),), values={"type": found["type"]}
    )


@_message(["crimer rank"], r"crimer rank \[(?P<ip>[^/\]]+)/(?P<dev>\d+)\] status\[(?P<type>\w+)\]")
def _crimer(found: Match[str]) -> PeerMessage:
    return PeerMessage(
        "location", addresses=((_server(found["ip"]), _device(found["dev"])),), values={"type": found["type"]}
    )


@_message(["Failed to connect agent["], r"Failed to connect agent\[(?P<ranks>[\d, ]+)\]")
def _missing_agents(found: Match[str]) -> PeerMessage:
    return PeerMessage("missing", wait=CONNECT, ranks=numbers_in(found["ranks"]))


@_message(["connected rankinfo"], r"connected rankinfo\[LINE \d+\]:(?P<ranks>[\s\[\]\d,]+)")
def _connected(found: Match[str]) -> PeerMessage:
    return PeerMessage("connected", ranks=numbers_in(found["ranks"]))


@_message(["need connect rankNum"], r"need connect rankNum is \[(?P<count>\d+)\]")
def _needed(found: Match[str]) -> PeerMessage:
    return PeerMessage("needed", values={"count": found["count"]})


@_message(
    ["client", "server"],
    r"\|\s*(?P<dst>" + IP + r")\((?P<drank>\d+)\)\s*\|(?:\s*\d+\s*\|)?"
    r"\s*(?P<src>" + IP + r")\((?P<srank>\d+)\)\s*\|(?:\s*\d+\s*\|)?\s*(?P<role>client|server)"
    r"\s*\|\s*(?P<status>[^|]+?)\s*(?:\||$)(?:\s*(?P<tls>\w+)\s*\|)?",
)
def _link_row(found: Match[str]) -> PeerMessage:
    ranks = (int(found["drank"]),)
    values = {"from": found["srank"], "status": found["status"], "tls": found["tls"] or ""}
    return PeerMessage("link", wait=CONNECT, ranks=ranks, addresses=((found["dst"], None),), values=values)


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
    return PeerMessage("link", wait=wait, ranks=ranks, addresses=((address, _device(device)),), values=values)


@_message(
    ["fails to connect to dstRank"], r"fails to connect to dstRank \(server (?P<d>[^,]+), device ID (?P<dd>\d+)\)"
)
def _detected(found: Match[str]) -> PeerMessage:
    addresses = ((_server(found["d"]), _device(found["dd"])),)
    return PeerMessage("link", wait=CONNECT, addresses=addresses, values={"from": "", "status": "detected", "tls": ""})


@_message(
    ["rankList for enabled tls"],
    r"rankList for enabled tls:(?P<on>.*?)rankList for disabled tls:"
    r"(?P<off>.*?)(?:rankList for query|$)",
)
def _tls(found: Match[str]) -> PeerMessage:
    return PeerMessage("tls", wait=None, values={"on": found["on"], "off": found["off"]})


@_message(["EI0016", "tlsStatus are inconsistent"], r"EI0016|tlsStatus are inconsistent")
def _tls_plain(found: Match[str]) -> PeerMessage:
    return PeerMessage("tls", values={"on": "", "off": ""})


@_message(
    ["cqe err", "cqe error"],
    r"cqe err(?:or)? status\[(?P<status>\d+)\].*?(?:remoteIP\{server\[(?P<rs>[^\]]+)\],"
    r"deviceId\[(?P<rd>[^\]]*)\](?:,deviceIp\[(?P<rip>[^\]]+)\])?|ip:\[(?P<ip>[^\]]+)\])",
)
def _cqe(found: Match[str]) -> PeerMessage:
    named = ((found["rip"], None), (found["rs"], _device(found["rd"])), (found["ip"], None))
    addresses = [(_server(address), device) for address, device in named if address]
    return PeerMessage("cqe", addresses=tuple(addresses), values={"status": found["status"]})


@_message(["CQE"], r"EI0013.*?Peer information: server (?P<s>[^,]+), device ID (?P<d>\d+)")
def _cqe_words(found: Match[str]) -> PeerMessage:
    return PeerMessage("cqe", addresses=((_server(found["s"]), int(found["d"])),), values={"status": "12"})


@_message(
    ["EI0005", "check fail. local[", "inconsistent between ranks"],
    r"(?:EI0005|CMD information (?P<field>\w+) check fail|inconsistent between ranks)"
    r"(?:.*?parameter (?P<parameter>\w+))?(?:.*?\blocal(?: end )?\[?(?P<own>[^\],]+))?",
)
def _differs(found: Match[str]) -> PeerMessage:
    """`values`: what the rank itself gave for the parameter that differs."""
    parameter, own = found["field"] or found["parameter"], found["own"]
    return PeerMessage("differs", values={parameter or "value": own.strip()} if own else {})


@_message(
    ["Task run failed, base information", "base information: "],
    r"(?:Task run failed, base information|base information: ).*?tag\[(?P<tag>[A-Za-z]+)_?(?P<group>[^\]]*)\]",
)
def _task_tag(found: Match[str]) -> PeerMessage:
    return PeerMessage("tag", values={"tag": found["tag"], "group": found["group"]})


@_message(["opData information"], r"opData information is .*?index\[(?P<index>\d+)\]")
def _op_index(found: Match[str]) -> PeerMessage:
    return PeerMessage("index", values={"index": found["index"]})


@_message(["remote rank:["], r"remote rank:\[(?P<r>\d+)\].*?(?:rankSize\[(?P<size>\d+)\])?")
def _remote(found: Match[str]) -> PeerMessage:
    return PeerMessage("remote", ranks=(int(found["r"]),))


@_message(["from remote rank"], r"from remote rank:? ?\[(?P<r>\d+)\]")
def _remote_wait(found: Match[str]) -> PeerMessage:
    return PeerMessage("remote", wait=EXEC, ranks=(int(found["r"]),))


@_message(
    ["EI0002", "Notify register", "notify wait timeout", "Notify Wait", "[TaskExecStage][Timeout]"],
    r"EI0002|wait execution of the Notify register times out|notify wait timeout|taskType\[Notify Wait\]|"
    r"\[TaskExecStage\]\[Timeout\]",
)
def _exec_timeout(found: Match[str]) -> PeerMessage:
    return PeerMessage("timeout", wait=EXEC)


@_message(
    ["EI0006", "socket time", "socket establish timeout", "link establish"],
    r"EI0006|[Gg]et(?:ting)? socket time(?:s )?out|wait socket establish timeout",
)
def _connect_timeout(found: Match[str]) -> PeerMessage:
    return PeerMessage("timeout", wait=CONNECT)


@_message(
    ["EI0015", "topo exchange", "TopoExchangeAgent"],
    r"EI0015|topo exchange (?:server|agent) get socket timeout|TopoExchangeAgent: connect server\[[^\]]+\] failed",
)
def _meeting_timeout(found: Match[str]) -> PeerMessage:
    is_server = "exchange server" in found.group()  # it heard of some: its door was open
    return PeerMessage("clients" if is_server else "timeout", wait=CONNECT)
