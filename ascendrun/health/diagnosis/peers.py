"""Words of a rank about other ranks: whom it lost, whom it waited for, whom its communication library accuses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Match, Optional, Pattern, Sequence, Tuple

from ascendrun.health.diagnosis.evidence import Line
from ascendrun.health.diagnosis.places import IP, places_of

LOST, CONNECT, EXEC = "lost", "connect", "exec"
"""Of `Word.wait`: a peer's connection broke; a link was never made; a collective did not come to its end."""


@dataclass(frozen=True)
class Word:
    """One line that speaks of other ranks. `wait`: what this rank suffered by it, None: it only accuses.

    `ranks`: named by number; `addresses`: named by (address, device or None); `kind`: what the line is.
    """

    kind: str
    line: Line
    wait: Optional[str] = None
    ranks: Tuple[int, ...] = ()
    addresses: Tuple[Tuple[str, Optional[int]], ...] = ()
    values: Mapping[str, str] = None  # type: ignore[assignment]


Maker = Callable[[Match[str], Line], Word]
_TABLE: List[Tuple[Tuple[str, ...], Pattern[str], Maker]] = []


def _word(needles: Sequence[str], pattern: str) -> Callable[[Maker], Maker]:
    """Registers a maker for lines that hold one of `needles` and match `pattern`."""
    def register(maker: Maker) -> Maker:
        _TABLE.append((tuple(needles), re.compile(pattern), maker))
        return maker
    return register


def find_words(lines: Iterable[Line]) -> Iterator[Word]:
    """In the order of the lines; one line may say several things."""
    has_needle = _any_needle().search
    for line in lines:
        text = line.text
        if has_needle(text) is None:
            continue
        for needles, pattern, maker in _TABLE:
            if any(needle in text for needle in needles):
                found = pattern.search(text)
                if found is not None:
                    yield maker(found, line)


@lru_cache(maxsize=1)
def _any_needle() -> Pattern[str]:
    """One search instead of one for each row of the table: of a long log hardly a line is of interest."""
    return re.compile("|".join(sorted({re.escape(needle) for needles, _, _ in _TABLE for needle in needles})))


def _numbers(text: str) -> Tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", text))


def _server(text: str) -> str:
    return text.partition("%")[0]


def _device(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdigit() else None


# ---------------------------------------------------------------- HCCL accuses


@_word(["Exception Location"], r"Cluster Exception Location\[IP/ID\]:\s*\[(?P<ip>[^/\]]+)/(?P<dev>\d+)\]"
                               r".*?ExceptionType:\[(?P<type>[^\]]+)\]")
def _location(found: Match[str], line: Line) -> Word:
    return Word("location", line, addresses=((_server(found["ip"]), _device(found["dev"])),),
                values={"type": found["type"]})


@_word(["crimer rank"], r"crimer rank \[(?P<ip>[^/\]]+)/(?P<dev>\d+)\] status\[(?P<type>\w+)\]")
def _crimer(found: Match[str], line: Line) -> Word:
    return Word("location", line, addresses=((_server(found["ip"]), _device(found["dev"])),),
                values={"type": found["type"]})


@_word(["Failed to connect agent["], r"Failed to connect agent\[(?P<ranks>[\d, ]+)\]")
def _missing_agents(found: Match[str], line: Line) -> Word:
    return Word("missing", line, wait=CONNECT, ranks=_numbers(found["ranks"]))


@_word(["connected rankinfo"], r"connected rankinfo\[LINE \d+\]:(?P<ranks>[\s\[\]\d,]+)")
def _connected(found: Match[str], line: Line) -> Word:
    return Word("connected", line, ranks=_numbers(found["ranks"]))


@_word(["need connect rankNum"], r"need connect rankNum is \[(?P<count>\d+)\]")
def _needed(found: Match[str], line: Line) -> Word:
    return Word("needed", line, values={"count": found["count"]})


@_word(["client", "server"], r"\|\s*(?P<dst>" + IP + r")\((?P<drank>\d+)\)\s*\|(?:\s*\d+\s*\|)?"
              r"\s*(?P<src>" + IP + r")\((?P<srank>\d+)\)\s*\|(?:\s*\d+\s*\|)?\s*(?P<role>client|server)"
              r"\s*\|\s*(?P<status>[^|]+?)\s*(?:\||$)(?:\s*(?P<tls>\w+)\s*\|)?")
def _link_row(found: Match[str], line: Line) -> Word:
    return Word("link", line, wait=CONNECT, ranks=(int(found["drank"]),), addresses=((found["dst"], None),),
                values={"from": found["srank"], "status": found["status"], "tls": found["tls"] or ""})


@_word(["createLink para"], r"createLink para:rank\[\d+\]-localUserrank\[(?P<l>\d+)\]-localIpAddr\[(?P<lip>[^\]]*)\], "
                            r"(?:remoteRank|dst_rank)\[\d+\]-remoteUserrank\[(?P<r>\d+)\]-"
                            r"remote(?:IpAddr|_ip_addr)\[(?P<rip>[^\]]*)\]")
def _transport(found: Match[str], line: Line) -> Word:
    address, _, device = found["rip"].partition("/")
    wait = None if "Create Dest error" in line.text else CONNECT
    return Word("link", line, wait=wait, ranks=(int(found["r"]),), addresses=((address, _device(device)),),
                values={"from": found["l"], "status": "", "tls": ""})


@_word(["fails to connect to dstRank"], r"fails to connect to dstRank \(server (?P<d>[^,]+), device ID (?P<dd>\d+)\)")
def _detected(found: Match[str], line: Line) -> Word:
    return Word("link", line, wait=CONNECT, addresses=((_server(found["d"]), _device(found["dd"])),),
                values={"from": "", "status": "detected", "tls": ""})


@_word(["rankList for enabled tls"], r"rankList for enabled tls:(?P<on>.*?)rankList for disabled tls:"
                                    r"(?P<off>.*?)(?:rankList for query|$)")
def _tls(found: Match[str], line: Line) -> Word:
    return Word("tls", line, wait=None, values={"on": found["on"], "off": found["off"]})


@_word(["EI0016", "tlsStatus are inconsistent"], r"EI0016|tlsStatus are inconsistent")
def _tls_plain(found: Match[str], line: Line) -> Word:
    return Word("tls", line, values={"on": "", "off": ""})


@_word(["cqe err", "cqe error"], r"cqe err(?:or)? status\[(?P<status>\d+)\].*?(?:remoteIP\{server\[(?P<rs>[^\]]+)\],"
                                 r"deviceId\[(?P<rd>[^\]]*)\](?:,deviceIp\[(?P<rip>[^\]]+)\])?|ip:\[(?P<ip>[^\]]+)\])")
def _cqe(found: Match[str], line: Line) -> Word:
    named = ((found["rip"], None), (found["rs"], _device(found["rd"])), (found["ip"], None))
    addresses = [(_server(address), device) for address, device in named if address]
    return Word("cqe", line, addresses=tuple(addresses), values={"status": found["status"]})


@_word(["CQE"], r"EI0013.*?Peer information: server (?P<s>[^,]+), device ID (?P<d>\d+)")
def _cqe_words(found: Match[str], line: Line) -> Word:
    return Word("cqe", line, addresses=((_server(found["s"]), int(found["d"])),), values={"status": "12"})


@_word(["Got completion from peer"], r"Got completion from peer (?P<ip>[^<\s]+)<\d+> with status=(?P<status>\d+)")
def _completion(found: Match[str], line: Line) -> Word:
    return Word("completion", line, wait=LOST, addresses=((found["ip"], None),), values={"status": found["status"]})


@_word(["EI0005", "check fail. local[", "inconsistent between ranks"],
       r"(?:EI0005|CMD information \w+ check fail|inconsistent between ranks)"
       r"(?:.*?\blocal(?: end )?\[?(?P<own>[^\],]+))?")
def _differs(found: Match[str], line: Line) -> Word:
    return Word("differs", line, values={"own": (found["own"] or "").strip()})


@_word(["Task run failed, base information", "base information: "],
       r"(?:Task run failed, base information|base information: ).*?tag\[(?P<tag>[A-Za-z]+)_?(?P<group>[^\]]*)\]")
def _task_tag(found: Match[str], line: Line) -> Word:
    return Word("tag", line, values={"tag": found["tag"], "group": found["group"]})


@_word(["opData information"], r"opData information is .*?index\[(?P<index>\d+)\]")
def _op_index(found: Match[str], line: Line) -> Word:
    return Word("index", line, values={"index": found["index"]})


@_word(["remote rank:["], r"remote rank:\[(?P<r>\d+)\].*?(?:rankSize\[(?P<size>\d+)\])?")
def _remote(found: Match[str], line: Line) -> Word:
    return Word("remote", line, ranks=(int(found["r"]),))


@_word(["from remote rank"], r"from remote rank:? ?\[(?P<r>\d+)\]")
def _remote_wait(found: Match[str], line: Line) -> Word:
    return Word("remote", line, wait=EXEC, ranks=(int(found["r"]),))


# ---------------------------------------------------------------- waits


@_word(["EI0002", "Notify register", "notify wait timeout", "Notify Wait", "[TaskExecStage][Timeout]"],
       r"EI0002|wait execution of the Notify register times out|notify wait timeout|taskType\[Notify Wait\]|"
       r"\[TaskExecStage\]\[Timeout\]")
def _exec_timeout(found: Match[str], line: Line) -> Word:
    return Word("timeout", line, wait=EXEC)


@_word(["EI0006", "socket time", "socket establish timeout", "link establish"],
       r"EI0006|[Gg]et(?:ting)? socket time(?:s )?out|wait socket establish timeout")
def _connect_timeout(found: Match[str], line: Line) -> Word:
    return Word("timeout", line, wait=CONNECT)


@_word(["EI0015", "topo exchange", "TopoExchangeAgent"],
       r"EI0015|topo exchange (?:server|agent) get socket timeout|TopoExchangeAgent: connect server\[[^\]]+\] failed")
def _meeting_timeout(found: Match[str], line: Line) -> Word:
    is_server = "exchange server" in found.group()  # it heard of some: its door was open
    return Word("clients" if is_server else "timeout", line, wait=CONNECT)


@_word(["Watchdog caught collective operation timeout"],
       r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: \w+\("
       r"(?:.*?SeqNum=(?P<seq>\d+))?(?:.*?OpType=(?P<op>\w+))?")
def _watchdog(found: Match[str], line: Line) -> Word:
    values = {name: found[name] for name in ("seq", "op") if found[name]}
    return Word("sequence" if "seq" in values else "timeout", line, wait=EXEC, values=values)


@_word(["watchdog got stuck"], r"ProcessGroup\w+'s watchdog got stuck for \d+ seconds")
def _watchdog_stuck(found: Match[str], line: Line) -> Word:
    return Word("stuck", line, wait=EXEC)


@_word(["failed to pass monitoredBarrier"], r"[Rr]anks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier")
def _barrier(found: Match[str], line: Line) -> Word:
    return Word("missing", line, wait=EXEC, ranks=_numbers(found["ranks"]))


@_word(["joined", "worker_count"], r"(?P<joined>\d+)/(?P<all>\d+) clients joined|"
                                   r"world_size=(?P<size>\d+), worker_count=(?P<count>\d+)")
def _store_missing(found: Match[str], line: Line) -> Word:
    values = {"joined": found["joined"] or found["count"], "expected": found["all"] or found["size"]}
    return Word("clients", line, wait=CONNECT, values=values)


@_word(["o route to host", "Host is down", "etwork is unreachable", "onnection timed out", "(gai error: "],
       r"(?P<no_route>[Nn]o route to host|Host is down)|(?P<no_network>[Nn]etwork is unreachable)|"
       r"(?P<no_answer>[Cc]onnection timed out)|\(gai error: -?\d+ - (?P<no_name>[\w ]+)")
def _unreached(found: Match[str], line: Line) -> Word:
    why = str(found.lastgroup)
    return Word("unreached", line, wait=None if why == "no_name" else CONNECT, addresses=_places(line.text),
                values={"why": why, "reason": found[why], "meeting": _MEETING.search(line.text) and "yes" or ""})


@_word(["while trying to connect to (", "TopoExchangeAgent: connect server["],
       r"timed out after \d+ms while trying to connect to \(|TopoExchangeAgent: connect server\[[^\]]+\] failed")
def _unreached_in_time(found: Match[str], line: Line) -> Word:
    return Word("unreached", line, wait=CONNECT, addresses=_places(line.text),
                values={"why": "in_vain", "reason": "timed out", "meeting": "yes"})


_MEETING = re.compile(r"c10d|gloo|TCPStore|socket\.cpp|hccl|HCCL|NCCL")
"""Such a line speaks of the job's own ranks, by whatever name or address."""


def _places(text: str) -> Tuple[Tuple[str, Optional[int]], ...]:
    return tuple((place, None) for place in places_of(text))


@_word(["Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused", "pair closure",
        "Software caused connection abort"],
       r"(?:gloo|pair\.cc|TCPStore|SocketImpl|socket\.cpp|\[c10d\]).*?"
       r"(?:Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused|pair closure|"
       r"connection abort)"
       r"(?:(?:, remote=|[ :]*)\[(?P<ip>[^\]]+)\](?::\d+)?)?|(?:Read|Write) error \[(?P<ip2>[^\]]+)\]:\d+")
def _lost(found: Match[str], line: Line) -> Word:
    address = found["ip"] or found["ip2"]
    return Word("lost", line, wait=LOST, addresses=((address, None),) if address else ())


@_word(["Connection closed by peer", "Connection reset by peer"],
       r"Connection (?:closed|reset) by peer \[(?P<ip>[^\]]+)\]")
def _lost_named(found: Match[str], line: Line) -> Word:
    return Word("lost", line, wait=LOST, addresses=((found["ip"], None),))


@_word(["ncclRemoteError", "remote process exited", "NCCL communicator was aborted", "failed to recv, got 0 bytes",
        "recvValue failed", "sendBytes failed", "recvBytes failed", "Failed to check the \"should dump\"",
        "process group has been aborted", "Timed out waiting", "Socket Timeout", "wait timeout after",
        "Connection was likely closed", "client socket has timed out", "client socket has failed to connect"],
       r"ncclRemoteError|remote process exited or there was a network error|NCCL communicator was aborted|"
       r"failed to recv, got 0 bytes|(?:recvValue|sendBytes|recvBytes) failed|Failed to check the .should dump|"
       r"process group has been aborted|Timed out waiting \d+ms for (?:recv|send) operation|Socket Timeout|"
       r"wait timeout after \d+|Connection was likely closed\. Did the remote server|"
       r"client socket has (?:timed out|failed to connect)")
def _lost_quietly(found: Match[str], line: Line) -> Word:
    is_wait = any(word in found.group() for word in ("imed out", "imeout", "failed to connect"))
    return Word("timeout" if is_wait else "lost", line, wait=EXEC if is_wait else LOST)


@_word(["terminate called"],
       r"terminate called after throwing an instance of '(?:gloo::|c10::Dist|c10d::|torch::distributed)")
def _terminated_by_transport(found: Match[str], line: Line) -> Word:
    return Word("lost", line, wait=LOST)


_LOOKS_LOST = re.compile(r"connections?\b.{0,40}\b(?:reset|closed|refused|aborted|lost|broken|failed)|broken pipe|"
                         r"remote (?:rank|peer|worker|process|end)|peer (?:rank|process|closed)|lost connection|"
                         r"connection error|process group .*(?:abort|destroyed)|"
                         r"communicator .*abort|^(?:\w+\.)*(?:EOFError|BrokenPipeError|Connection\w*Error|"
                         r"IncompleteReadError)\b", re.IGNORECASE)
_LOOKS_WAITED = re.compile(r"tim(?:ed|es|e)[ -]?out|deadline exceeded|barrier .*fail|rendezvous|"
                           r"\bHCCL (?:function )?error|\bNCCL error|ProcessGroup\w* .*error", re.IGNORECASE)


_OTHER_RANK = re.compile(r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b"
                         r"(?=.{0,60}\b(?:died|dead|fail\w*|lost|exit\w*|respond\w*|missing|crash\w*|unreachable|gone|heart\s?beat|left|stopped|abort\w*))|"
                         r"(?:lost|no (?:heartbeat|answer|reply)|heartbeat|waiting|waited)\b.{0,40}"
                         r"\b(?:rank|worker|peer|node|process|replica)s?\s*[#:=\[(]?\s*(\d+)\b", re.IGNORECASE)


def accuses(text: str, *, rank: int, world_size: int) -> Tuple[int, ...]:
    """The other ranks that an exception's own words tell to be gone; () none."""
    found = {int(number) for match in _OTHER_RANK.finditer(text) for number in match.groups() if number}
    return tuple(sorted(number for number in found - {rank} if number < world_size))


def looks_suffered(text: str) -> Optional[str]:
    """LOST or EXEC when an exception's words are those of one that another rank has let down; else None."""
    if _LOOKS_LOST.search(text):
        return LOST
    return EXEC if _LOOKS_WAITED.search(text) else None


def count_votes(words: Iterable[Word]) -> Dict[int, int]:
    """How many words name each rank."""
    votes: Dict[int, int] = {}
    for word in words:
        for rank in word.ranks:
            votes[rank] = votes.get(rank, 0) + 1
    return votes
