"""HCCL's rank table (RANK_TABLE_FILE): read it, say what is wrong with it, write it.

    read_rank_table(text) -> RankTable      check_rank_table(table) -> [TableFault]      write_rank_table(table) -> str

Versions: 1.0 (servers; 910A, A2, A3 without a super-pod), 1.2 (A3 super-pod), and "legacy", the group_list of old
910A tools, which is read but not written. Numbers stand in it as strings.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ascendrun.ascend.reading import read_int, read_ip

V1_0, V1_2, LEGACY = "1.0", "1.2", "legacy"
_PORT_KEYS = ("device_port", "backup_device_port", "host_port")


@dataclass(frozen=True)
class RankedDevice:
    """One device of the table; None where the table does not say. `rank` of a legacy table is its place in the list."""

    rank: Optional[int]
    device_id: Optional[int]
    device_ip: Optional[str]
    super_device_id: Optional[int] = None
    backup_device_ip: Optional[str] = None
    device_port: Optional[int] = None
    backup_device_port: Optional[int] = None
    host_port: Optional[int] = None


@dataclass(frozen=True)
class RankedServer:
    server_id: str
    host_ip: Optional[str]
    devices: Tuple[RankedDevice, ...]


@dataclass(frozen=True)
class TableFault:
    """What is wrong, where (`server_list[1].device[0]`), and the way out. A table with faults makes HCCL fail."""

    code: str
    where: str
    says: str
    hint: str


@dataclass(frozen=True)
class RankTable:
    """`version` None: not a rank table that we know. `faults` are those of form; check_rank_table finds the others."""

    version: Optional[str]
    status: Optional[str]
    server_count: Optional[int]
    servers: Tuple[RankedServer, ...]
    super_pods: Tuple[Tuple[str, Tuple[str, ...]], ...] = ()
    faults: Tuple[TableFault, ...] = ()

    @property
    def device_count(self) -> int:
        return sum(len(server.devices) for server in self.servers)


def read_rank_table(text: str) -> RankTable:
    """The table as far as it can be read; never raises, faults of form are listed in it."""
    try:
        top = json.loads(text, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        hint = "HCCL reads plain JSON: no comments, no trailing commas; the file must not be a symbolic link"
        return RankTable(None, None, None, (), faults=(TableFault("not-json", "", f"not JSON: {error}"[:200], hint),))
    if not isinstance(top, dict):
        fault = TableFault("not-a-table", "", "not a JSON object", "write it with `ascendrun`, or by Huawei's template")
        return RankTable(None, None, None, (), faults=(fault,))
    return _Form(top).table()


class _Doubled(ValueError):
    pass


def _no_doubles(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise _Doubled(f"key {twice[0]!r} stands twice in one object")
    return dict(pairs)


class _Form:
    """Walks the parsed JSON, taking what has the right form and listing what has not."""

    def __init__(self, top: Mapping[str, Any]) -> None:
        self._top = top
        self._faults: List[TableFault] = []

    def table(self) -> RankTable:
        top = self._top
        status = top.get("status") if isinstance(top.get("status"), str) else None
        if "group_list" in top:
            servers = self._legacy()
            return RankTable(LEGACY, status, None, servers, (), tuple(self._faults))
        version = top.get("version")
        if version not in (V1_0, V1_2):
            self._say("version", "version", f"version {version!r}", 'use "1.0", or "1.2" for an A3 super-pod')
            version = None
        count = self._number(top, "server_count", "", 1, 65535)
        servers = tuple(
            self._server(server, f"server_list[{n}]") for n, server in enumerate(self._list(top, "server_list", ""))
        )
        pods = self._super_pods() if version == V1_2 else ()
        return RankTable(version, status, count, servers, pods, tuple(self._faults))

    def _server(self, server: Mapping[str, Any], where: str) -> RankedServer:
        devices = self._list(server, "device", where)
        return RankedServer(
            self._text(server, "server_id", where) or "",
            self._address(server, "host_ip", where),
            tuple(self._device(device, f"{where}.device[{n}]") for n, device in enumerate(devices)),
        )

    def _device(self, device: Mapping[str, Any], where: str) -> RankedDevice:
        ports = {key: self._number(device, key, where, 1, 65535) if key in device else None for key in _PORT_KEYS}
        return RankedDevice(
            self._number(device, "rank_id", where, 0, 2**20),
            self._number(device, "device_id", where, 0, 65535),
            self._address(device, "device_ip", where),
            self._number(device, "super_device_id", where, 0, 2**32) if "super_device_id" in device else None,
            self._address(device, "backup_device_ip", where),
            **ports,
        )

    def _legacy(self) -> Tuple[RankedServer, ...]:
        rank = 0
        servers: Dict[str, List[RankedDevice]] = {}
        for g, group in enumerate(self._list(self._top, "group_list", "")):
            for n, instance in enumerate(self._list(group, "instance_list", f"group_list[{g}]")):
                where = f"group_list[{g}].instance_list[{n}]"
                devices = servers.setdefault(self._text(instance, "server_id", where) or "", [])
                for d, device in enumerate(self._list(instance, "devices", where)):
                    place = f"{where}.devices[{d}]"
                    number = self._number(device, "device_id", place, 0, 65535)
                    devices.append(RankedDevice(rank, number, self._address(device, "device_ip", place)))
                    rank += 1
        return tuple(RankedServer(name, None, tuple(devices)) for name, devices in servers.items())

    def _super_pods(self) -> Tuple[Tuple[str, Tuple[str, ...]], ...]:
        pods = []
        for n, pod in enumerate(self._list(self._top, "super_pod_list", "")):
            where = f"super_pod_list[{n}]"
            members = [self._text(one, "server_id", where) or "" for one in self._list(pod, "server_list", where)]
            pods.append((self._text(pod, "super_pod_id", where) or "", tuple(members)))
        return tuple(pods)

    def _list(self, parent: Mapping[str, Any], key: str, where: str) -> List[Mapping[str, Any]]:
        items = parent.get(key)
        if not isinstance(items, list):
            self._say("missing", _join(where, key), "no list here", f'add "{key}": [...]')
            return []
        return [self._object(item, f"{_join(where, key)}[{n}]") for n, item in enumerate(items)]

    def _object(self, item: Any, where: str) -> Mapping[str, Any]:
        if isinstance(item, dict):
            return item
        self._say("wrong-type", where, f"{type(item).__name__} instead of an object", "see Huawei's template")
        return {}

    def _text(self, parent: Mapping[str, Any], key: str, where: str) -> Optional[str]:
        value = parent.get(key)
        if isinstance(value, str) and value:
            return value
        self._say("missing", _join(where, key), f"{value!r}"[:80], f'give "{key}" as a string')
        return None

    def _number(self, parent: Mapping[str, Any], key: str, where: str, low: int, high: int) -> Optional[int]:
        value = parent.get(key)
        number = read_int(value, low, high) if isinstance(value, str) else None
        if number is None:
            says = f"{value!r}"[:80] if key in parent else "missing"
            self._say("number", _join(where, key), says, f'a number from {low} to {high}, in quotes: "{low}"')
        return number

    def _address(self, parent: Mapping[str, Any], key: str, where: str) -> Optional[str]:
        value = parent.get(key)
        address = read_ip(value) if isinstance(value, str) else None
        if address is None and key in parent:
            self._say("address", _join(where, key), f"{value!r}"[:80], "an IPv4 or IPv6 address in quotes")
        return address

    def _say(self, code: str, where: str, says: str, hint: str) -> None:
        self._faults.append(TableFault(code, where, says, hint))


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def check_rank_table(table: RankTable) -> Tuple[TableFault, ...]:
    """All that is wrong with a table, form first: counts, ranks, doubled ids and addresses, families, super-pods."""
    faults = list(table.faults)

    def say(code: str, where: str, says: str, hint: str) -> None:
        faults.append(TableFault(code, where, says, hint))

    devices = [(server, device) for server in table.servers for device in server.devices]
    if table.version and table.status != "completed":
        say("status", "status", f"status is {table.status!r}", 'HCCL waits for "completed"')
    if table.server_count is not None and table.server_count != len(table.servers):
        says = f"server_count {table.server_count}, but {len(table.servers)} servers are listed"
        say("server-count", "server_count", says, "make both the same")
    ranks = sorted(device.rank for _, device in devices if device.rank is not None)
    if devices and None not in {device.rank for _, device in devices} and ranks != list(range(len(devices))):
        say("ranks", "rank_id", "ranks are not 0.." + str(len(devices) - 1), "each rank once, from 0, without gaps")
    for name in _twice(server.server_id for server in table.servers):
        say("server-twice", "server_list", f"server_id {name!r} stands twice", "one entry for each server")
    for server in table.servers:
        for number in _twice(device.device_id for device in server.devices):
            say("device-twice", server.server_id, f"device_id {number} stands twice", "each device once for a server")
    for address in _twice(device.device_ip for _, device in devices):
        say("address-twice", "device_ip", f"{address} belongs to two devices", "compare hccn_tool -i N -ip -g")
    families = {":" in device.device_ip for _, device in devices if device.device_ip}
    if len(families) > 1:
        say("address-family", "device_ip", "IPv4 and IPv6 are mixed", "give all devices addresses of one family")
    without = [server.server_id for server, device in devices if device.device_ip is None]
    if len(table.servers) > 1 and without:
        says = f"{len(without)} devices without device_ip, first on {without[0]}"
        say("no-address", "device_ip", says, "device_ip is needed between servers: cat /etc/hccn.conf")
    if table.version == V1_2:
        _check_super_pods(table, say)
    return tuple(faults)


def _check_super_pods(table: RankTable, say: Any) -> None:
    names = {server.server_id for server in table.servers}
    members = [name for _, pod in table.super_pods for name in pod]
    for name in sorted(names - set(members)):
        say("no-super-pod", "super_pod_list", f"server {name} is in no super-pod", "add it to its pod's server_list")
    for name in sorted(set(members) - names):
        say("unknown-server", "super_pod_list", f"server {name} is not in server_list", "remove or add it")
    for name in _twice(members):
        say("two-super-pods", "super_pod_list", f"server {name} is in two super-pods", "a server has one pod")
    for pod, servers in table.super_pods:
        devices = [d for server in table.servers if server.server_id in servers for d in server.devices]
        if any(device.super_device_id is None for device in devices):
            say("no-super-device", f"super-pod {pod}", "devices without super_device_id", "npu-smi info -t spod-info")
        for number in _twice(device.super_device_id for device in devices):
            says = f"super_device_id {number} stands twice"
            say("super-device-twice", f"super-pod {pod}", says, "each device of a pod has its own id")


def _twice(values: Any) -> List[Any]:
    counted = Counter(value for value in values if value is not None)
    return sorted(value for value, times in counted.items() if times > 1)


def write_rank_table(table: RankTable) -> str:
    """The table as JSON for HCCL. Raises ValueError when it is legacy or has faults: HCCL would only fail later."""
    faults = check_rank_table(table)
    if faults or table.version not in (V1_0, V1_2):
        first = f"{faults[0].where}: {faults[0].says}" if faults else f"version {table.version}"
        raise ValueError(f"rank table not written, {first}")
    servers = []
    for server in table.servers:
        host = {"host_ip": server.host_ip} if server.host_ip else {}
        servers.append({"server_id": server.server_id, **host, "device": [_written(one) for one in server.devices]})
    top: Dict[str, Any] = {
        "status": "completed",
        "version": table.version,
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    if table.version == V1_2:
        top["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": name} for name in names]}
            for pod, names in table.super_pods
        ]
    return json.dumps(top, indent=4) + "\n"


def _written(device: RankedDevice) -> Dict[str, str]:
    keys = ("device_id", "super_device_id", "device_ip", "device_port", "backup_device_ip", "backup_device_port")
    said = {key: getattr(device, key) for key in (*keys, "host_port")}
    return {**{key: str(value) for key, value in said.items() if value is not None}, "rank_id": str(device.rank)}


def complete(table: RankTable) -> RankTable:
    """The table with status and count as its servers have them, as a maker of tables wants it."""
    return replace(table, status="completed", server_count=len(table.servers))
