"""Hostfiles that are right, and choosing among their hosts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.errors import InvalidInputError, NotFoundError
from ascendrun.core.hosts import Host, parse_hostfile, select_hosts
from ascendrun.core.names import InvalidNamesError, expand_names
from ascendrun.text.format import fold_hosts


def names(hosts):
    return [host.name for host in hosts]


def test_a_full_line_becomes_a_host():
    line = "npu01 slots=8 addr=10.0.0.3 user=train port=2222 devices=0,1,10 groups=a,b  # rack 1"
    assert parse_hostfile(line, "h") == (Host("npu01", 8, "10.0.0.3", "train", 2222, (0, 1, 10), ("a", "b"), 1),)


def test_a_deepspeed_file_is_read_as_it_is():
    hosts = parse_hostfile("worker-1 slots=4\nworker-2 slots=4\n\n# worker-3 slots=4\n", "h")
    assert [(host.name, host.slots, host.line) for host in hosts] == [("worker-1", 4, 1), ("worker-2", 4, 2)]


def test_an_open_mpi_file_is_read_as_it_is():
    text = "aa slots=4 max_slots=6\nbb         max_slots=4\ncc slots = 2 max-slots=2\nme@dd\n10.0.0.7 slots=1\n"
    hosts = parse_hostfile(text, "h")
    assert [(host.name, host.slots, host.user) for host in hosts] == [
        ("aa", 4, None),
        ("bb", 4, None),
        ("cc", 2, None),
        ("dd", None, "me"),
        ("10.0.0.7", 1, None),
    ]


def test_a_range_gives_its_hosts_in_the_order_written():
    hosts = parse_hostfile("b slots=1\nnpu[03,01-02]-ib slots=8\na", "h")
    assert names(hosts) == ["b", "npu03-ib", "npu01-ib", "npu02-ib", "a"]
    assert [host.line for host in hosts] == [1, 2, 2, 2, 3]


def test_windows_line_ends_and_a_byte_order_mark_do_not_matter():
    assert parse_hostfile(b"\xef\xbb\xbfnpu01 slots=8\r\n\r\nnpu02\r\n", "h") == parse_hostfile(
        "npu01 slots=8\n\nnpu02", "h"
    )


def test_several_hosts_may_be_this_machine():
    hosts = parse_hostfile("one slots=2 addr=local\ntwo slots=2 addr=local\n", "h")
    assert [host.is_local for host in hosts] == [True, True]


def test_one_address_may_have_two_sshds():
    assert len(parse_hostfile("a addr=10.0.0.1 port=2201\nb addr=10.0.0.1 port=2202\n", "h")) == 2


def test_each_host_has_a_management_controller_for_itself():
    text = "a addr=10.0.0.1 bmc=10.1.0.1\nb addr=10.0.0.2 bmc=10.1.0.2\nc addr=10.1.0.1\n"
    assert [host.bmc for host in parse_hostfile(text, "h")] == ["10.1.0.1", "10.1.0.2", None]
    with pytest.raises(InvalidInputError) as caught:
        parse_hostfile("a bmc=m1\nb[1-2] bmc=M2\nc bmc=m1\n", "h")
    assert [problem.line for problem in caught.value.problems] == [2, 3]


def test_ipv6_addresses_are_read_with_and_without_brackets_and_zone():
    hosts = parse_hostfile("a addr=fe80::1%eth0\nb addr=[2001:db8::2]\n", "h")
    assert [host.addr for host in hosts] == ["fe80::1%eth0", "2001:db8::2"]


def test_hidden_characters_in_a_comment_are_nobodys_business():
    assert names(parse_hostfile("npu01 # \u200f\n", "h")) == ["npu01"]


def test_the_largest_file_allowed_is_read():
    assert len(parse_hostfile("npu[0001-4096] slots=8", "h")) == 4096


def test_hosts_are_selected_in_the_order_of_the_file():
    hosts = parse_hostfile("npu[01-04] groups=x\ngpu7 groups=x,y", "h")
    assert names(select_hosts(hosts, "gpu7,npu[03,02]")) == ["npu02", "npu03", "gpu7"]
    assert names(select_hosts(hosts, "@y, npu01")) == ["npu01", "gpu7"]


@pytest.mark.parametrize("wanted, hint", [("npu[03-05]", None), ("npu011", "suggest.did-you-mean"), ("@rack", None)])
def test_selecting_what_the_file_does_not_have_names_it(wanted, hint):
    with pytest.raises(NotFoundError) as caught:
        select_hosts(parse_hostfile("npu[01-04] groups=row", "h"), wanted)
    assert caught.value.message.values in ({"hosts": ["npu05"]}, {"hosts": ["npu011"]}, {"group": "rack"})
    assert caught.value.hint and (hint is None or caught.value.hint.key == hint)


@pytest.mark.parametrize("wanted", ["npu[1-100000000]", "", "a,,b", "-x", "npu[1", "a b"])
def test_selecting_by_what_is_no_set_of_names_is_refused(wanted):
    with pytest.raises(InvalidInputError):
        select_hosts(parse_hostfile("a", "h"), wanted)


def test_names_are_folded():
    assert fold_hosts(["npu01", "npu02", "npu03", "npu09"]) == "npu[01-03,09]"
    assert fold_hosts(["b", "a"]) == "a,b"
    assert fold_hosts(["npu7"]) == "npu7"
    assert fold_hosts([]) == ""


@given(st.lists(st.from_regex(r"[a-z]{1,3}(-[0-9]{2}|[0-9]{1,3})?", fullmatch=True), min_size=1, max_size=30))
def test_folding_loses_no_name(given_names):
    from ClusterShell.NodeSet import NodeSet

    assert set(NodeSet(fold_hosts(given_names))) == set(given_names)


@given(st.text(max_size=60))
def test_any_text_is_names_or_no_names(text):
    try:
        assert all(expand_names(text))
    except InvalidNamesError:
        pass


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200),
        st.lists(
            st.sampled_from(
                [
                    "npu",
                    "[",
                    "]",
                    "01-04",
                    ",",
                    " ",
                    "slots=",
                    "8",
                    "addr=",
                    "local",
                    "\n",
                    "#",
                    "max_slots",
                    " = ",
                    "@",
                    "devices=0,1",
                    "\u202e",
                    "\0",
                    "\r",
                ]
            ),
            max_size=30,
        ).map("".join),
    )
)
def test_no_hostfile_crashes_the_parser(data):
    try:
        hosts = parse_hostfile(data, "h")
    except InvalidInputError as error:
        assert error.problems and all(problem.message and problem.file == "h" for problem in error.problems)
    else:
        assert hosts and len({host.name.lower() for host in hosts}) == len(hosts)
