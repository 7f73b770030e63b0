"""Every message reads back as it was sent; what is missing or unreadable is named."""

import json
from typing import Any

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.core.pulse import HostPulse, JobPulse, Pulse
from ascendrun.core.reports import NodeReport, Route
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.head.protocol import control_messages as messages
from ascendrun.head.protocol.messages import Done, Message, Request
from ascendrun.text import Text

HOSTS = (Host("n1", slots=8, addr="10.0.0.1", devices=(0, 1), groups=("a",), line=3), Host("n2"))
FAILURE = Failure("unreachable", Text("t.a", "{host}: away", host="n1"), Text("t.b", "look"))
ROUTES = {"n2": Route("eth0", "10.0.0.1")}
REPORT = NodeReport("n1", "/r", "n1", "b", None, "u", "/py", "3.11", "5.10", "arm64", 4, 1, None, 0.5, ROUTES)
PULSE = Pulse(
    5.0, 2.0, "b", 7, "r", {"j-0001": JobPulse("STAGING", {"n1": HostPulse("ALIVE", 4.5, 8)}, {"n1": (1, 2)})}
)
MESSAGES: list[Message] = [
    messages.Submit(({"key": "k"},), "j-0001"),
    messages.Submitted("j-0001"),
    messages.Stop("j-0001", now=True),
    messages.Plan({"key": "k"}),
    messages.Planned({"nodes": []}),
    messages.Exec(HOSTS, ("echo", "a"), 3.5),
    messages.ExecReply("n1", 1.5, FAILURE),
    messages.ExecReply("n1", 1.5, code=None, signal=9, timed_out=True, out_bytes=4),
    messages.Nodes(HOSTS),
    messages.NodeReply("n1", REPORT),
    messages.NodeReply("n1", refused=FAILURE),
    messages.Survey(HOSTS, {"key": "k"}, "npu", ("/data",), ("ports",), is_full=False, every_pair=True),
    messages.Survey(HOSTS),
    messages.SurveyReply("n1", report={"host": "n1"}, results={"ports": {}}),
    messages.Sample(HOSTS, 5.0, "npu", unless_pending=True),
    messages.SampleReply("n1", (DeviceSample(1.0, "n1", 0, "npu", pids=(1, 2)),), (HostSample(1.0, "n1", 5.0),)),
    messages.Grep("j-0001", 2, {"n1": {"patterns": ["a"]}}),
    messages.GrepReply("n1", Text("t.c", "late"), complete=False),
    messages.Gather("j-0001"),
    messages.GatherReply("n1", "no space left"),
    messages.Status(),
    messages.ControllerStatus(7, ("j-0001",), PULSE),
    messages.Shutdown(),
    Done(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_reads_back_as_it_was_sent(message: Message) -> None:
    header = json.loads(json.dumps({"id": 1, "protocol": 3, **message.to_header(), "from_the_future": 1}))
    assert type(message).from_header(header) == message


@pytest.mark.parametrize(
    ("kind", "header", "field", "reason"),
    [
        (messages.Stop, {"now": True}, "job", "control.missing-field"),
        (messages.Exec, {"hosts": [], "argv": []}, "timeout_s", "control.missing-field"),
        (messages.Exec, {"hosts": [{"addr": "a"}], "argv": [], "timeout_s": 1}, "hosts", "control.invalid-field"),
        (messages.Exec, {"hosts": [], "argv": [], "timeout_s": "soon"}, "timeout_s", "control.invalid-field"),
        (messages.NodeReply, {"host": "a", "report": {"host": "a"}}, "report", "control.invalid-field"),
    ],
)
def test_a_field_that_is_missing_or_unreadable_is_named(kind: Any, header: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        kind.from_header(header)
    message = caught.value.problems[0].message
    assert isinstance(message, Text) and message.key == "control.field"
    assert (message.values["op"], message.values["field"]) == (kind.OP, field)
    assert message.values["reason"].key == reason


def test_every_request_has_an_operation_of_its_own() -> None:
    kinds = Request.__subclasses__()
    own = [kind.OP for kind in kinds if kind.__module__ == messages.__name__]
    assert len(own) > 10 and len(set(own)) == len(own)
