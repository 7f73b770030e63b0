"""Two hosts as directories: what the agents would read of a job's files, without agents, torch or devices."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ascendrun.cluster import Cluster
from ascendrun.cluster.api import Head
from ascendrun.cluster.hosts import Hosts
from ascendrun.cluster.job import Job
from ascendrun.cluster.job_files import JobFiles
from ascendrun.cluster.jobs import Jobs
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.control_messages import Plan, Submit
from ascendrun.head.survey.submission import Submission
from ascendrun.health.survey.check_context import CheckContext
from ascendrun.health.survey.facts import Disk, NodeFacts
from ascendrun.node.agent import training_files
from ascendrun.programs.nanochat.sizes import SPECIAL

HOSTS = ("n1", "n2")
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LAYER = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (176, 64),
    "mlp.up_proj": (176, 64),
    "mlp.down_proj": (64, 176),
}
TENSORS = {
    "model.embed_tokens.weight": (2000, 64),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()},
}
CHAT = [
    {"instruction": f"question {n}", "output": f"answer {n}", "difficulty": ("explain", "reasoning", "topology")[n % 3]}
    for n in range(120)
]
POINTS = "MMSI,BaseDateTime,LAT,LON,SOG,COG,class\n" + "".join(
    f"{211000000 + ship},2024-01-01T{hour:02d}:00:00,{54 + hour / 100:.4f},{10 + ship / 10:.4f},{ship + 1}.5,90.0,"
    f"{('Cargo', 'Tug')[ship % 2]}\n"
    for ship in range(8)
    for hour in range(24)
)


def safetensors(tensors: Mapping[str, Sequence[int]], *, cut: int = 0) -> bytes:
    header, at = {}, 0
    for name, shape in tensors.items():
        size = 2
        for each in shape:
            size *= each
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return (struct.pack("<Q", len(text)) + text + bytes(at))[: -cut or None]


def files() -> dict[str, bytes]:
    """The files of a healthy host, by path."""
    return {
        "/base/config.json": json.dumps(CONFIG).encode(),
        "/base/tokenizer.json": json.dumps({"model": {"vocab": {"a": 0}}}).encode(),
        "/base/model.safetensors": safetensors(TENSORS),
        "/tokens/tokenizer.json": json.dumps(
            {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": token} for token in SPECIAL]}
        ).encode(),
        "/data/chat.json": json.dumps(CHAT).encode(),
        "/data/points.csv": POINTS.encode(),
        "/data/proteins.csv": b"protein\nMAK\n",
    }


QWEN = {"base_model": "/base", "data_path": "/data/chat.json", "global_batch_size": 16, "warmup_steps": 2}
SHIPS = {"data_path": "/data/points.csv"}
GENES = {"mode": "pretrain", "data_path": "generated"}
TEXTS = {"mode": "base", "data_path": "generated", "tokenizer_dir": "/tokens", "total_batch_size": 4 * 32 * 2048}
USUAL = {"qwen_lora": QWEN, "trajectory": SHIPS, "codon": GENES, "nanochat": TEXTS}
"""Options of a training of each program that the hosts can run."""
DNA = {"mode": "optimize", "model_path": "/base", "input": "/data/proteins.csv", "organism": "51"}
Change = Mapping[str, Any]


def rows(change: Callable[[list[Any]], Any]) -> bytes:
    changed = json.loads(json.dumps(CHAT))
    return json.dumps(change(changed) or changed).encode()


def config(**changes: Any) -> bytes:
    return json.dumps({**CONFIG, **changes}).encode()


def words(*names: str, added: int | None = None, **more: int) -> bytes:
    """A tokenizer of these words, numbered from 0, and of `more`; `added`: the number of a token beside them."""
    vocabulary = {**{name: number for number, name in enumerate(names)}, **more}
    tokens = [] if added is None else [{"id": added, "content": "<added>"}]
    return json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}).encode()


def saved(**identity: Any) -> bytes:
    """The manifest of a checkpoint of a training with these options."""
    return json.dumps({"step": 2, "kind": "step", "facts": {"identity": identity}, "parts": {}, "here": []}).encode()


INDEX = json.dumps({"weight_map": {name: f"model-{at % 2}.safetensors" for at, name in enumerate(TENSORS)}}).encode()
HALF = safetensors({name: shape for at, (name, shape) in enumerate(TENSORS.items()) if at % 2 == 0})
BAD: dict[str, tuple[str, Change, Change, str]] = {
    # name: (program, options, files of the second host or of both hosts, code)
    "Muon by DeepSpeed": ("nanochat", {"strategy": "zero3"}, {}, "muon-zero3"),
    "ranks without peers": ("trajectory", {"strategy": "none"}, {}, "strategy-none"),
    "batches found by a sharded model": (
        "trajectory",
        {"strategy": "fsdp2", "auto_find_batch_size": True},
        {},
        "find-batch-sharded",
    ),
    "groups of three among four ranks": ("codon", {"strategy": "hsdp", "shard_size": 3}, {}, "shard-size"),
    "no data": ("qwen_lora", {"data_path": "/data/none.json"}, {}, "not-found"),
    "no data is named": ("qwen_lora", {"data_path": ""}, {}, "no-data-path"),
    "no tracks are named": ("trajectory", {"data_path": None}, {}, "no-data-path"),
    "data on one host only": ("qwen_lora", {}, {"n2:/data/chat.json": None}, "not-found"),
    "data differs": ("qwen_lora", {}, {"n2:/data/chat.json": rows(lambda found: found[:-1])}, "data-differs"),
    "no base": ("qwen_lora", {"base_model": "/none"}, {}, "not-found"),
    "no config": ("qwen_lora", {}, {"/base/config.json": None}, "no-config"),
    "config is not JSON": ("qwen_lora", {}, {"/base/config.json": b"{"}, "bad-config"),
    "config without sizes": ("qwen_lora", {}, {"/base/config.json": b"{}"}, "no-sizes"),
    "no tokenizer": ("qwen_lora", {}, {"/base/tokenizer.json": None}, "no-tokenizer"),
    "tokenizer is cut": ("qwen_lora", {}, {"/base/tokenizer.json": b'{"model"'}, "bad-tokenizer"),
    "a tokenizer of another model": (
        "qwen_lora",
        {},
        {"/base/tokenizer.json": words("a", "b", z=2000)},
        "tokenizer-rows",
    ),
    "added tokens without rows": ("qwen_lora", {}, {"/base/tokenizer.json": words("a", added=2151)}, "tokenizer-rows"),
    "no weights": ("qwen_lora", {}, {"/base/model.safetensors": None}, "no-weights"),
    "half the shards": (
        "qwen_lora",
        {},
        {
            "/base/model.safetensors": None,
            "/base/model-0.safetensors": HALF,
            "/base/model.safetensors.index.json": INDEX,
        },
        "missing-shards",
    ),
    "a shard is cut": ("qwen_lora", {}, {"n2:/base/model.safetensors": safetensors(TENSORS, cut=100)}, "truncated"),
    "not safetensors": ("qwen_lora", {}, {"/base/model.safetensors": b"PK\x03\x04" * 9}, "bad-weights"),
    "an adapter as base": (
        "qwen_lora",
        {},
        {"/base/config.json": None, "/base/adapter_config.json": b"{}"},
        "is-adapter",
    ),
    "unknown targets": ("qwen_lora", {"target_modules": ["wqkv"]}, {}, "unknown-target"),
    "sharded with float16": ("qwen_lora", {"strategy": "fsdp2", "dtype": "float16"}, {}, "no-scaling"),
    "float16 on a CPU": ("qwen_lora", {"dtype": "float16"}, {}, "float16-cpu"),
    "a quantised base": ("qwen_lora", {"quantization_bit": "4"}, {}, "no-qlora"),
    "offload without shards": ("qwen_lora", {"strategy": "ddp", "cpu_offload": True}, {}, "offload"),
    "groups that do not divide": ("qwen_lora", {"strategy": "hsdp", "shard_size": 3}, {}, "shard-size"),
    "a graph for other devices": ("trajectory", {"compile": "torchair"}, {}, "compile-device"),
    "a graph of weights that move": ("qwen_lora", {"strategy": "zero3", "compile": "torch"}, {}, "compile-zero3"),
    "a stage that is none": ("qwen_lora", {"curriculum_schedule": ["half"]}, {}, "stage-form"),
    "stages that fall": ("qwen_lora", {"curriculum_schedule": ["1=1/1/1", "0.5=1/1/1"]}, {}, "stage-order"),
    "curriculum without difficulty": (
        "qwen_lora",
        {"curriculum": "on"},
        {"/data/chat.json": rows(lambda found: [{k: v for k, v in row.items() if k != "difficulty"} for row in found])},
        "no-difficulty",
    ),
    "some without difficulty": (
        "qwen_lora",
        {},
        {"/data/chat.json": rows(lambda found: found[0].pop("difficulty") and None)},
        "some-difficulty",
    ),
    "unknown difficulty": ("qwen_lora", {"difficulty_levels": ["explain", "hard", "x"]}, {}, "unknown-level"),
    "not UTF-8": ("qwen_lora", {}, {"/data/chat.json": b'[{"instruction": "\xff"}]'}, "not-utf8"),
    "not JSON": ("qwen_lora", {}, {"/data/chat.json": b"[\n{\n"}, "bad-row"),
    "a role that is no text": ("qwen_lora", {}, {"/data/chat.json": b'[[{"role": [], "content": "x"}]]'}, "bad-row"),
    "no samples": ("qwen_lora", {}, {"/data/chat.json": b"[]"}, "no-rows"),
    "no reply": ("qwen_lora", {}, {"/data/chat.json": rows(lambda found: found[3].update(output=" "))}, "bad-row"),
    "texts for another program": ("qwen_lora", {}, {"/data/chat.json": b'{"text": "a b", "label": 1}\n'}, "other-form"),
    "a table instead of samples": ("qwen_lora", {"data_path": "/data/points.csv"}, {}, "other-form"),
    "a model that fits on no device": (
        "qwen_lora",
        {"base_model": None, "model_preset": "qwen2.5-72b", "chip": "910B4", "device": "npu", "strategy": "ddp"},
        {},
        "does-not-fit",
    ),
    "a model that fits on no host": (
        "qwen_lora",
        {"base_model": None, "model_preset": "qwen2.5-72b", "cpu_offload": True, "strategy": "fsdp2"},
        {},
        "host-too-small",
    ),
    "longer than the model": ("qwen_lora", {"cutoff_len": 5000}, {}, "over-positions"),
    "an unknown preset": ("qwen_lora", {"base_model": None, "model_preset": "qwen9"}, {}, "unknown-preset"),
    "an unknown chip": ("qwen_lora", {"chip": "911"}, {}, "unknown-chip"),
    "heads do not divide": ("trajectory", {"hidden_size": 65}, {}, "hidden-heads"),
    "every token sees the next": (
        "trajectory",
        {"mode": "pretrain", "objective": "clm", "attention": "bidirectional"},
        {},
        "clm-bidirectional",
    ),
    "foreign columns": (
        "trajectory",
        {},
        {"/data/points.csv": POINTS.replace("BaseDateTime", "T").replace("LAT", "Y").replace("LON", "X").encode()},
        "no-column",
    ),
    "columns that are not there": ("trajectory", {"column_map": ["time=when"]}, {}, "unknown-columns"),
    "an empty table": ("trajectory", {}, {"/data/points.csv": b""}, "table-empty"),
    "one class": ("trajectory", {}, {"/data/points.csv": POINTS.replace("Tug", "Cargo").encode()}, "one-class"),
    "two ships": (
        "trajectory",
        {},
        {"/data/points.csv": "".join(POINTS.splitlines(keepends=True)[: 1 + 2 * 24]).encode()},
        "few-ships",
    ),
    "another kind of file": ("trajectory", {"data_path": "/base/config.json"}, {}, "data-form"),
    "sizes of segments": ("trajectory", {"segment_size": 5}, {}, "segment-sizes"),
    "no model to evaluate": ("trajectory", {"mode": "evaluate"}, {}, "model-required"),
    "another architecture": (
        "trajectory",
        {"base_model": "/base"},
        {"/base/config.json": config(model_type="llama")},
        "model-type",
    ),
    "no proteins": ("codon", {**DNA, "input": "/data/none.csv"}, {}, "not-found"),
    "a protein of other letters": ("codon", DNA, {"n2:/data/proteins.csv": b"protein\nMA1K\n"}, "codon-residues"),
    "no codon is left": ("codon", {**DNA, "avoid": ["ATG"]}, {}, "codon-no-codon"),
    "an unknown organism": ("codon", {**DNA, "organism": "Escherichia"}, {}, "codon-organism"),
    "nobody writes it": ("trajectory", {"prepared_dir": "out"}, {}, "not-written"),
}


def write_job(folder: Path, program: str, args: Change, **more: Any) -> Path:
    job = {
        "name": "job",
        "program": program,
        "nodes": 2,
        "devices": {"type": "cpu", "per_node": 2},
        "hostfile": "two.hosts",
        "args": {**USUAL.get(program, {}), **args},
        **more,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


class PlanHead(Head):
    """What the hosts of a `PlanCluster` and its controller reply."""

    def __init__(self, world: PlanCluster) -> None:
        super().__init__(world.settings)
        self.world = world

    def survey(self, hosts: Any, submission: Submission | None, **options: Any) -> CheckContext:
        facts = {}
        for host in (each.name for each in hosts):
            inside = {str(self.world.root / host) + path: path for path in options["training"]}
            found = training_files.examine({"paths": list(inside)}, time.monotonic() + 30)["paths"]
            facts[host] = NodeFacts(
                host=host,
                root="/root/.ascendrun",
                disks={"/root/.ascendrun": Disk("/", free_bytes=self.world.free_bytes)},
                memory_bytes=64 << 30,
                training={inside[path]: raw for path, raw in found.items()},
            )
        return CheckContext(facts=facts)

    def request(self, request: Any, **options: Any) -> Any:
        if isinstance(request, Plan):
            return PlanReply()
        assert isinstance(request, Submit)
        self.world.stored.append(request.submissions)
        raise SystemExit(0)


class PlanHosts(Hosts):
    def held(self) -> tuple[Any, ...]:
        return ()


class PlanJobs(Jobs):
    def submit(self, *args: Any, install_log: object = None, **options: Any) -> Job:
        """As that of a cluster; no package is installed."""
        return super().submit(*args, **options)


@dataclass
class PlanCluster(Cluster):
    """A cluster whose hosts are directories below `root`; `stored`: submissions that the controller got."""

    settings: Settings
    root: Path
    chip: str = ""
    free_bytes: int = 10**12
    stored: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head = PlanHead(self)
        self.hosts, self.jobs, self.job_files = PlanHosts(self), PlanJobs(self), JobFiles(self)

    def write(self, host: str, path: str, data: bytes | None) -> None:
        """Write a file of a host; None: remove it."""
        place = self.root / host / path.lstrip("/")
        if data is None:
            place.unlink()
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


@dataclass
class PlanReply:
    plan: Mapping[str, Any] = field(default_factory=dict)
