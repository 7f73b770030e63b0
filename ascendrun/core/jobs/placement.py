"""Hosts and devices that a job uses, and what these hosts lack for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Union

from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.launchers import RAY
from ascendrun.core.jobs.roles import Part, place_parts
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec

Fault = tuple[tuple[Union[str, int], ...], Text, Text]
"""An unmet requirement of a job: key of the job file, message, hint."""


def choose_hosts(spec: JobSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts that the job uses: the first `nodes` of the file, all without `nodes`; those of roles in the
    order of the roles.

    Raises PreflightError when the file has fewer.
    """
    for _, message, hint in _missing_hosts(spec, hosts):
        raise PreflightError(message, hint=hint)
    return tuple(host for _, own in place_parts(spec, hosts) for host in own)


def pool_of(spec: JobSpec, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts on which the job may be placed: those that give it as many ranks as the first `nodes` of the
    file do. Raises PreflightError when the file has fewer than `nodes`."""
    chosen = choose_hosts(spec, hosts)
    parts = list(place_parts(spec, chosen))
    sizes = [{len(choose_devices(part.spec, host)) for host in own} for part, own in parts]

    def is_like_them(host: Host) -> bool:
        return all(
            not any(_host_faults(part.spec, [host])) and {len(choose_devices(part.spec, host))} == size
            for (part, _), size in zip(parts, sizes)
        )

    if any(part.groups for part, _ in parts) or (spec.roles and not all(map(is_like_them, chosen))):
        return chosen  # in their order: not each of them can have each role
    return tuple(host for host in hosts if host in chosen or is_like_them(host))


def placement_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    """Yield unmet requirements of the job. `hosts`: all of the hostfile."""
    yield from _missing_hosts(spec, hosts)
    parts = list(place_parts(spec, hosts))
    chosen = [host for _, own in parts for host in own]
    for index, (part, own) in enumerate(parts):
        role = spec.roles[index] if spec.roles else None
        for key, message, hint in (*_host_faults(part.spec, own), *_starter_faults(part.spec, own)):
            is_own = role is not None and (key == ("command",) or role.devices is not None)
            yield ("roles", index, *key) if is_own else key, message, hint
    yield from _shared_devices(parts)
    if spec.launcher in ("deepspeed", "accelerate") and len({len(choose_devices(spec, host)) for host in chosen}) > 1:
        yield (
            ("launcher",),
            Text(
                "plan.uneven-ranks",
                "launcher {launcher} requires the same number of ranks on each node",
                launcher=spec.launcher,
            ),
            Text("plan.uneven-ranks.hint", "set devices.per_node"),
        )


_STARTERS = ("llamafactory-cli", "lmf")
"""Commands that start torchrun where they see several devices, even in a rank. ms-swift does so only if it is told."""


def _starter_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    words = spec.command or ("",)
    name = words[0].rpartition("/")[2]
    if spec.launcher in ("none", RAY) or name not in _STARTERS or "train" not in words[1:2]:
        return
    if any(len(choose_devices(spec, host)) > 1 for host in hosts):
        yield (
            ("command",),
            Text("plan.starts-torchrun", "{name} starts torchrun itself, here in every rank", name=name),
            Text("plan.starts-torchrun.hint", "write launcher: none: one process on each node, which starts the ranks"),
        )


def _host_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    yield from _slot_faults(spec, hosts)
    if spec.devices.type != "cpu":
        yield from _device_faults(spec, hosts)


def _slot_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    key = "per_node" if spec.devices.per_node else "ids"
    count = spec.devices.per_node or len(spec.devices.ids or ())
    small: dict[int, list[str]] = {}
    for host in hosts:
        if host.slots is not None and count > host.slots:
            small.setdefault(host.slots, []).append(host.name)
    for slots, names in small.items():
        message = Text(
            "plan.too-few-slots",
            "devices.{key} requires {count:plural rank ranks} on each node; {hosts:hosts} has slots={slots}",
            key=key,
            count=count,
            hosts=names,
            slots=slots,
        )
        hint = Text("plan.too-few-slots-hint", "use at most {slots}, or raise slots=", slots=slots)
        yield ("devices", key), message, hint


def _device_faults(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    """Yield the hosts whose devices= lacks devices of the job."""
    lacking: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for host in hosts:
        ids, offered = spec.devices.ids, host.devices
        if offered is None:
            continue
        count = spec.devices.per_node or host.slots or 0 if ids is None else len(ids)
        if count > len(offered) or not set(ids or ()) <= set(offered):
            lacking.setdefault((count, offered), []).append(host.name)
    for (count, offered), names in lacking.items():
        if spec.devices.ids is None:
            message = Text(
                "plan.too-few-devices",
                "{hosts:hosts}: the job requires {count:plural device devices}; devices={offered:ranks}",
                count=count,
                hosts=names,
                offered=list(offered),
            )
            hint = Text("plan.lower-count", "use at most {count}, or change devices=", count=len(offered))
            yield ("devices", "per_node"), message, hint
        else:
            message = Text(
                "plan.missing-devices",
                "devices.ids requires {missing:ranks}; {hosts:hosts} has devices={offered:ranks}",
                missing=[each for each in spec.devices.ids if each not in offered],
                hosts=names,
                offered=list(offered),
            )
            yield ("devices", "ids"), message, Text("plan.missing-devices.hint", "change ids, or devices= of the host")


def _shared_devices(parts: Sequence[tuple[Part, Sequence[Host]]]) -> Iterator[Fault]:
    """Yield devices of several local hosts: these are one machine, and a device may belong to one host only."""
    owner: dict[int, str] = {}
    local = [(part.spec, host) for part, hosts in parts for host in hosts if host.is_local]
    for spec, host in local:
        for device in choose_devices(spec, host) if spec.devices.type != "cpu" else ():
            first = owner.setdefault(device, host.name)
            if first != host.name:
                message = Text(
                    "plan.shared-device",
                    "{first} and {second} are both this machine and would use the same device {device}",
                    first=first,
                    second=host.name,
                    device=device,
                )
                hint = Text("plan.shared-device.hint", "give each of them its own devices= in the hostfile")
                yield ("devices",), message, hint
                break


def _missing_hosts(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[Fault]:
    count, listed = spec.nodes or 1, len(hosts)
    if listed < count:
        text = "job {name} requires {count:plural node nodes}; the hostfile lists {listed}"
        hint = Text("plan.too-few-hosts-hint", "--set nodes={listed}, or add hosts to the hostfile", listed=listed)
        if not listed or spec.roles:
            hint = Text("plan.add-hosts", "add hosts to the hostfile")
        yield ("nodes",), Text("plan.too-few-hosts", text, name=spec.name, count=count, listed=listed), hint
        return
    for index, (part, own) in enumerate(place_parts(spec, hosts)):
        if part.spec.nodes is not None and len(own) < part.spec.nodes:
            text = "role {role} requires {count:plural node nodes} of {groups}; the hostfile has {listed} for it"
            hint = Text("plan.role-hosts-hint", "write groups= at more hosts; roles take hosts in their order")
            values = {"role": part.role, "count": part.spec.nodes, "groups": list(part.groups), "listed": len(own)}
            yield ("roles", index, "groups"), Text("plan.role-hosts", text, **values), hint


def choose_devices(spec: JobSpec, host: Host) -> tuple[int, ...]:
    """Return one device id for each rank of the host; for the device type cpu they are only counted."""
    if spec.devices.ids is not None:
        return spec.devices.ids
    offered = host.devices if spec.devices.type != "cpu" else None
    count = spec.devices.per_node or host.slots or len(offered or ()) or 1
    return offered[:count] if offered is not None else tuple(range(count))
