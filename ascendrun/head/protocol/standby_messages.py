"""The messages between a head and its standby, over the controller's socket."""

from __future__ import annotations

from collections.abc import Mapping

from ascendrun.head.protocol.messages import Done, Message, Request, converted


class StandbyChange(Message):
    """What has changed at the head. `stream`, `number`: to be acknowledged when it is on disk. `files`: path, bytes of
    the body, and whether more of the file follows, each. `gone`: files and groups that were removed. `is_stopped`: the
    head was stopped on purpose."""

    stream: int
    number: int
    files: tuple[tuple[str, int, bool], ...] = converted(lambda rows: tuple(map(tuple, rows)), default=())
    gone: tuple[str, ...] = converted(tuple, default=())
    is_stopped: bool = False


class Follow(Request[StandbyChange], op="follow"):
    """Send what differs from a copy, and then every change. `standby`: the machine of the copy. `groups`, `trees`: what
    it has, as in spool/standby_copy.py."""

    standby: str
    groups: Mapping[str, str]
    trees: tuple[str, ...] = converted(tuple)


class Acknowledge(Request[Done], op="acknowledge"):
    """State that a change and all before it are on disk. It has no reply."""

    stream: int
    number: int
