"""Plans: what fits, what does not and why, and what each process gets."""

import json
import subprocess
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.errors import PreflightError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobs.checkpoints import ResumePoint
from ascendrun.core.jobs.placement import choose_hosts, placement_faults
from ascendrun.core.jobs.plan import PORT_TOKEN, Folders, Tree, make_plan
from ascendrun.core.jobs.plan_text import prepare_request, render_plan, render_text
from ascendrun.core.network import candidate_ports
from ascendrun.core.rank_env import OWN_VARIABLES
from ascendrun.core.reports import Route
from ascendrun.head.protocol.agent_messages import Prepare
from ascendrun.node import layout
from ascendrun.node import ranks as agent_ranks
from ascendrun.options import make_arguments
from tests.lib.launch_plans import job, meshed, plan, ranks_of, refusal, report


def test_the_plan_and_the_node_agree_on_the_words_between_them():
    assert PORT_TOKEN == agent_ranks.PORT_TOKEN
    hosts = parse_hostfile("a\n", "h")
    folders = {"a": Folders(work="/r/w", checkpoints="/r/c", attempt=layout.attempt_dir("/r", "h-j1.2"), trees="/r/t")}
    planned = make_plan(
        job(), hosts, {"a": report("a")}, job="j1", attempt=2, run_id="h-j1.2", folders=folders, trees=()
    )
    env = ranks_of(planned)[0].env
    assert env["TORCHELASTIC_ERROR_FILE"] == layout.attempt_dir("/r", "h-j1.2") + "/rank-0.error.0"
    assert env["ASCENDRUN_METRICS_FILE"] == layout.attempt_dir("/r", "h-j1.2") + "/rank-0.metrics.0"
    assert env[layout.TAG_VARIABLE] == "h-j1.2"


@pytest.mark.parametrize(("pointer", "step"), [("repair", 4), ("repair", 0), (None, 4)])
def test_a_pointer_file_is_set_back_only_if_the_job_says_so(pointer, step):
    resume = ResumePoint(step, "deepspeed", {"a": "/a/global_step4", "b": "/b/global_step4"} if step else {})
    planned = plan(job(checkpoint={"pointer": pointer}), "a\nb\n", resume=resume)
    sent = [prepare_request(node, planned).get("pointer") for node in planned.nodes]
    wanted = [{"format": "deepspeed", "path": path, "step": 4} for path in resume.paths.values()]
    assert sent == (wanted if pointer and step else [None, None])


@pytest.mark.parametrize(("names", "resources"), [({"npu": "NPU"}, '{"NPU": 2}'), ({"cuda": "GPU"}, "{}")])
def test_ray_is_given_the_devices_that_it_does_not_find(names, resources):
    spec = job(launcher="ray", devices={"type": "npu", "ids": (2, 3)})
    (node,) = plan(spec, "a slots=8\n", ray_names=names).nodes
    assert f"--resources={resources}" in node.launcher.argv


def test_a_container_has_the_devices_of_the_job_and_numbers_them_from_0():
    box, devices = {"image": "site/cann"}, {"type": "npu", "ids": (2, 3)}
    outputs = ("out/", "/data/out.csv", "/far/runs/*.csv", "/deep/out/")
    spec = job(container=box, devices=devices, checkpoint={"dir": "/ckpt"}, outputs=outputs)
    planned = plan(spec, "a slots=8\n")
    (node,) = planned.nodes
    assert node.devices == (2, 3) and node.ranks[0].env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    sent = Prepare.from_header(prepare_request(node, planned)).container
    assert (sent["devices"], sent["python"]) == ({"type": "npu", "ids": [2, 3]}, "python3")
    assert sent["paths"] == ["/ckpt", "/data", "/far/runs", "/deep/out"]
    assert "site/cann" in render_text(render_plan(planned))


def test_fewer_hosts_than_nodes_do_not_fit():
    with pytest.raises(PreflightError) as caught:
        choose_hosts(job(nodes=3), parse_hostfile("a\nb\n", "h"))
    assert caught.value.message.values == {"name": "j", "count": 3, "listed": 2}


def test_a_job_without_hosts_does_not_fit_and_never_runs_here():
    with pytest.raises(PreflightError) as caught:
        choose_hosts(job(), ())
    assert caught.value.hint.key == "plan.add-hosts"


def test_every_reason_is_reported_together():
    message = refusal(job(devices={"type": "npu", "per_node": 8}), "a slots=4\nb devices=0,1\nc\nd\n", reports={})
    assert message.key == "plan.faults"
    reasons = [reason.values["message"] for reason in message.values["reasons"]]
    assert [(reason.key, reason.values["hosts"]) for reason in reasons] == [
        ("plan.no-report", ["a", "b", "c", "d"]),
        ("plan.too-few-slots", ["a"]),
        ("plan.too-few-devices", ["b"]),
    ]


def test_device_ids_that_a_host_does_not_offer_do_not_fit():
    message = refusal(job(devices={"type": "npu", "ids": (0, 2, 5)}), "a devices=0,1,2\nb\n")
    assert message.key == "plan.missing-devices"
    assert message.values == {"missing": [5], "hosts": ["a"], "offered": [0, 1, 2]}


@pytest.mark.parametrize(
    "host, routes, key, values",
    [
        ("c", {"b": Route("eth0", "10.0.0.3")}, "network.no-route", {"host": "c", "peer": "a"}),
        ("b", {"a": Route("lo", "127.0.0.1")}, "network.loopback", {"host": "b", "peer": "a"}),
        ("a", {"b": Route("lo", "127.0.0.1")}, "network.node-0-no-route", {"host": "a", "peers": ["b", "c"]}),
    ],
)
def test_a_node_without_a_route_to_its_peers_is_named_with_them(host, routes, key, values):
    reports = meshed(parse_hostfile("a\nb\nc\n", "h"))
    reports[host] = report(host, routes=routes)
    fault = refusal(job(), "a\nb\nc\n", reports)
    assert (fault.key, fault.values) == (key, values)


def test_the_meeting_address_is_the_one_node_0_shows_to_most_others():
    hosts = parse_hostfile("a\nb\nc\nd\n", "h")
    reports = meshed(hosts)
    reports["a"] = report(
        "a",
        routes={"b": Route("mgmt", "192.168.0.1"), "c": Route("bond0", "10.1.0.1"), "d": Route("bond0", "10.1.0.1")},
    )
    reports["b"] = report("b", routes={"a": Route("enp7", "192.168.0.2")})
    planned = plan(job(devices={"type": "npu"}), "a\nb\nc\nd\n", reports)
    assert planned.master_address == "10.1.0.1"
    assert [rank.env["HCCL_SOCKET_IFNAME"] for rank in ranks_of(planned)] == ["=bond0", "=enp7", "=eth0", "=eth0"]
    assert [rank.env["GLOO_SOCKET_IFNAME"] for rank in ranks_of(planned)] == ["bond0", "enp7", "eth0", "eth0"]


def test_hosts_that_are_all_this_machine_meet_on_the_loopback():
    for hostfile in ("a addr=local\nb addr=local\n", "a addr=127.0.0.1 port=2201\nlocalhost port=2202\n", "only\n"):
        hosts = parse_hostfile(hostfile, "h")
        planned = plan(job(), hostfile, {host.name: report(host.name) for host in hosts})
        assert planned.master_address == "127.0.0.1"
        assert {rank.env["GLOO_SOCKET_IFNAME"] for rank in ranks_of(planned)} == {"lo"}


def test_local_hosts_beside_a_remote_one_use_the_interface_towards_it():
    reports = {
        "here1": report("here1", routes={"away": Route("eth1", "10.0.0.9")}),
        "here2": report("here2"),
        "away": report("away", routes={"here1": Route("eth5", "10.0.0.7")}),
    }
    planned = plan(job(), "here1 addr=local\nhere2 addr=local\naway\n", reports)
    assert planned.master_address == "10.0.0.9"
    assert [rank.env["GLOO_SOCKET_IFNAME"] for rank in ranks_of(planned)] == ["eth1", "eth1", "eth5"]


def test_local_hosts_share_the_cpus_of_this_machine():
    planned = plan(
        job(devices={"per_node": 2}),
        "a addr=local\nb addr=local\n",
        {"a": report("a", cpus=9), "b": report("b", cpus=9)},
    )
    assert {rank.env["OMP_NUM_THREADS"] for rank in ranks_of(planned)} == {"2"}
    crowded = plan(job(devices={"per_node": 4}), "a addr=local\n", {"a": report("a", cpus=2)})
    assert {rank.env["OMP_NUM_THREADS"] for rank in ranks_of(crowded)} == {"1"}


def test_two_local_hosts_must_not_share_a_device():
    spec = job(devices={"type": "npu", "per_node": 2})
    assert refusal(spec, "a addr=local\nb addr=local\n").values == {"first": "a", "second": "b", "device": 0}
    planned = plan(spec, "a addr=local devices=0,1\nb addr=local devices=2,3\n")
    assert [rank.env["ASCEND_RT_VISIBLE_DEVICES"] for rank in ranks_of(planned)] == ["0,1", "0,1", "2,3", "2,3"]


@pytest.mark.parametrize(
    "devices, line, count",
    [
        ({}, "a", 1),
        ({}, "a slots=3", 3),
        ({"per_node": 2}, "a slots=3", 2),
        ({"type": "npu"}, "a devices=4,6", 2),
        ({"type": "npu", "ids": (1, 2)}, "a slots=8", 2),
        ({"type": "npu"}, "a slots=2 devices=4,6,7", 2),
    ],
)
def test_ranks_on_a_node_follow_from_the_job_then_the_hostfile(devices, line, count):
    assert plan(job(devices=devices), line).world_size == count


def test_ranks_count_over_nodes_of_different_size():
    planned = plan(job(), "a slots=1\nb slots=3\n")
    assert [
        (rank.rank, rank.local_rank, rank.env["LOCAL_WORLD_SIZE"], rank.env["NODE_RANK"]) for rank in ranks_of(planned)
    ] == [(0, 0, "1", "0"), (1, 0, "3", "1"), (2, 1, "3", "1"), (3, 2, "3", "1")]


def test_only_the_first_hosts_of_the_file_are_taken():
    assert [node.host for node in plan(job(nodes=2), "c\na\nb\n").nodes] == ["c", "a"]


def test_a_rank_gets_every_variable_that_torchrun_sets():
    env = ranks_of(plan(job(devices={"per_node": 2}), "a\nb\n"))[3].env
    for name, value in {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "h-j1.1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "NODE_RANK": "1",
        "TORCHELASTIC_ERROR_FILE": "/r/attempt-1/rank-3.error.0",
        "ASCENDRUN_METRICS_FILE": "/r/attempt-1/rank-3.metrics.0",
        "ASCENDRUN_RUN_ID": "h-j1.1",
        "ASCENDRUN_CHECKPOINT_DIR": "/r/ckpt",
        "PYTHONUNBUFFERED": "1",
    }.items():
        assert env[name] == value, name
    assert "MASTER_PORT" not in env, "the agent adds it when the port is known"


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"launcher": "none", "devices": {"per_node": 4}}, ("2", "4")),
        ({"launcher": "none"}, ("2", "1")),
        ({}, ("2", "1")),
        ({"env": {"NNODES": "1"}}, ("1", "1")),
        ({"devices": {"per_node": 2}}, (None, None)),
        ({"launcher": "torchrun"}, (None, None)),
    ],
)
def test_the_only_process_of_a_node_can_start_torchrun_for_one_training(fields, expected):
    planned = plan(job(**fields), "a\nb\n")
    first, *_, last = [node.launcher for node in planned.nodes if node.launcher] or ranks_of(planned)
    assert (first.env.get("NNODES"), first.env.get("NPROC_PER_NODE")) == expected
    assert [(rank.env["NODE_RANK"], rank.env["MASTER_ADDR"]) for rank in (first, last)] == [
        ("0", "10.0.0.1"),
        ("1", "10.0.0.1"),
    ]


@pytest.mark.parametrize(
    "fields, path",
    [
        ({"python": "/opt/conda/bin/python"}, b"/opt/conda/bin:/usr/bin:/bin"),
        ({"python": "python3.11"}, b"/usr/bin:/bin"),
        ({}, b"/usr/bin:/bin"),
        ({"python": "/opt/py", "env": {"PATH": "/mine"}}, b"/mine"),
        ({"python": "/opt/py", "launcher": "torchrun"}, b"/opt:/usr/bin:/bin"),
    ],
)
def test_commands_next_to_the_jobs_interpreter_are_found_first(fields, path):
    planned = plan(job(**fields), "a\n")
    started = planned.nodes[0].launcher or ranks_of(planned)[0]
    env = agent_ranks.rank_environ(
        {b"PATH": b"/usr/bin:/bin"}, started.env, master_port=1, secret={}, tag="t", root="/r"
    )
    assert env[b"PATH"] == path
    lines = render_text(render_plan(planned)).splitlines()
    shell = subprocess.run(
        ["sh", "-c", "\n".join([line for line in lines if line.startswith("export ")] + ['printf %s "$PATH"'])],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert shell.stdout == path


@pytest.mark.parametrize(
    "fields, count, is_refused",
    [
        ({"command": ("llamafactory-cli", "train", "x.yaml")}, 2, True),
        ({"command": ("/opt/bin/lmf", "train", "x.yaml"), "launcher": "torchrun"}, 2, True),
        ({"command": ("llamafactory-cli", "train", "x.yaml")}, 1, False),
        ({"command": ("llamafactory-cli", "version")}, 2, False),
        ({"command": ("llamafactory-cli", "train", "x.yaml"), "launcher": "none"}, 2, False),
        ({"command": ("swift", "sft")}, 2, False),
    ],
)
def test_a_command_that_starts_torchrun_runs_once_on_a_node(fields, count, is_refused):
    found = placement_faults(job(**fields), parse_hostfile(f"a slots={count}\nb slots={count}\n", "h"))
    assert [(key, message.key) for key, message, _ in found] == (
        [(("command",), "plan.starts-torchrun")] if is_refused else []
    )


def test_what_we_set_ourselves_is_what_users_may_not_set():
    env = ranks_of(plan(job(), "a\n"))[0].env
    assert set(OWN_VARIABLES) <= set(env)


def test_the_users_own_values_win_over_our_defaults_and_are_never_altered():
    given_env = {
        "HCCL_SOCKET_IFNAME": "enp",
        "HCCL_CONNECT_TIMEOUT": "120",
        "OMP_NUM_THREADS": "7",
        "GLOO_SOCKET_IFNAME": "x",
        "PYTHONUNBUFFERED": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    env = ranks_of(plan(job(env=given_env, devices={"type": "npu"}), "a\nb\n"))[0].env
    assert {name: env[name] for name in given_env} == given_env


def test_hccls_own_connect_timeout_stays_where_the_user_shortened_its_execution_timeout():
    spec = job(env={"HCCL_EXEC_TIMEOUT": "600"}, devices={"type": "npu"})
    assert "HCCL_CONNECT_TIMEOUT" not in ranks_of(plan(spec, "a\nb\n"))[0].env


def test_an_ipv6_network_is_told_to_hccl():
    hosts = parse_hostfile("a\nb\n", "h")
    env = ranks_of(plan(job(devices={"type": "npu"}), "a\nb\n", meshed(hosts, source="fd00::{}")))[0].env
    assert (env["MASTER_ADDR"], env["HCCL_SOCKET_FAMILY"]) == ("fd00::1", "AF_INET6")


def test_the_users_master_port_is_the_only_candidate_and_no_variable_of_the_plan():
    planned = plan(job(env={"MASTER_PORT": "12345"}), "a\n")
    assert planned.master_ports == (12345,) and "MASTER_PORT" not in ranks_of(planned)[0].env


@given(st.text(max_size=40))
def test_candidate_ports_follow_from_the_tag_and_keep_clear_of_others(tag):
    ports = candidate_ports(tag, None)
    assert ports == candidate_ports(tag, None) and len(set(ports)) == 100
    assert all(20000 <= port <= 29999 and port not in (29400, 29500) for port in ports)


def test_the_stages_of_a_pipeline_and_the_attempts_of_a_job_begin_at_ports_of_their_own():
    tags = [f"h1-j-0003-{stage}.{attempt}" for stage in range(1, 6) for attempt in (1, 2)]
    assert len({candidate_ports(tag, None)[0] for tag in tags}) == len(tags)


def test_the_request_to_an_agent_holds_what_was_planned():
    trees = [Tree("code", "c" * 64, 1, 1), Tree("library", "d" * 64, 1, 1)]
    planned = plan(
        job(
            setup="source x",
            timeouts={"start_s": 5.0, "run_s": 9.0},
            checkpoint={"signal": "USR1", "grace_period_s": 3.0},
        ),
        "a\nb\n",
        trees=trees,
    )
    first, second = (prepare_request(node, planned) for node in planned.nodes)
    assert set(first) == set("tag node_rank ranks cwd setup trees link_tree library ports stop start_s max_s".split())
    assert set(first) <= {each.name for each in fields(Prepare)}, "the message to the agent drops other names"
    assert first["ports"] == list(planned.master_ports) and second["ports"] == []
    assert (first["link_tree"], first["library"], first["trees"]) == ("c" * 64, "d" * 64, ["c" * 64, "d" * 64])
    assert (first["stop"], first["start_s"], first["max_s"]) == ({"signal": "USR1", "grace_s": 3.0}, 5.0, 9.0)
    assert json.loads(json.dumps(first)) == first
    assert [node["prepare"] for node in render_plan(planned)["nodes"]] == [first, second]


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
variables = st.from_regex(r"X_[A-Z]{1,5}", fullmatch=True)


@given(st.lists(words, max_size=5), st.dictionaries(variables, words, max_size=4))
def test_any_word_and_any_variable_reaches_the_process_to_the_bit(command, env):
    rank = ranks_of(plan(job(command=("run", *command), env=env), "a"))[0]
    assert rank.argv == ("run", *command)
    assert {name: rank.env[name] for name in env} == env


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=10), min_size=1, max_size=4))
def test_the_printed_commands_mean_the_same_to_a_shell(command):
    text = render_text(render_plan(plan(job(command=("printf", "%s\\0", *command), devices={"per_node": 1}), "a")))
    script = "\n".join(line for line in text.split("\n") if not line.startswith("cd -- "))
    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=60).stdout
    assert out.decode() == "".join(f"{word}\0" for word in command)


def test_options_are_rendered_as_the_programs_read_them():
    args = {"lr": 2e-5, "n": 3, "flag": False, "names": ("a", 1, True), "text": "a b", "none": None}
    assert make_arguments(args) == ("--lr=2e-05", "--n=3", "--flag=false", "--names=a,1,true", "--text=a b")


def test_a_thousand_nodes_are_planned_in_one_pass():
    planned = plan(
        job(),
        "npu[0001-1000] slots=8",
        {
            f"npu{n:04d}": report(
                f"npu{n:04d}",
                routes={"npu0001": Route("eth0", f"10.0.{n // 250}.{n % 250}")}
                if n > 1
                else {"npu0002": Route("eth0", "10.9.9.9")},
            )
            for n in range(1, 1001)
        },
    )
    assert planned.world_size == 8000 and ranks_of(planned)[-1].env["RANK"] == "7999"


def test_missing_hosts_and_slots_are_found_with_the_key_that_asks_for_them():
    hosts = parse_hostfile("a[1-2] slots=2\nb slots=8\n", "h")
    found = list(placement_faults(job(nodes=4, devices={"type": "npu", "per_node": 8}), hosts))
    assert [(key, message.key) for key, message, _ in found] == [
        (("nodes",), "plan.too-few-hosts"),
        (("devices", "per_node"), "plan.too-few-slots"),
    ]
    assert found[1][1].values["hosts"] == ["a1", "a2"]
    assert not list(placement_faults(job(nodes=2, devices={"per_node": 2}), hosts))
