"""Runs of a program on forked ranks, as the launcher would start them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.lib.vcluster.processes import await_that
from tests.ports import free_port
from tests.programs.rounding import keep_only_those

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 200.0

TINY = (
    "--data_path=generated",
    "--synthetic_tracks=80",
    "--hidden_size=16",
    "--num_hidden_layers=1",
    "--num_attention_heads=2",
    "--global_batch_size=10",
    "--num_train_epochs=2",
    "--logging_steps=1",
    "--baselines=",
    "--boosted_trees=false",
    "--dtype=float32",
)
"""About 56 training tracks in 6 steps an epoch."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounding", action="store_true", help="programs: only what compares numbers within a tolerance")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--rounding", default=False):
        keep_only_those(config, items)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """As a base of the LoRA program has it that is made of conversations."""
    from ascendrun.programs.qwen_lora.chat_template import make_tokenizer, wrap_tokenizer
    from ascendrun.programs.qwen_lora.dataset import make_conversations

    return wrap_tokenizer(make_tokenizer(make_conversations(60, seed=1, system="Be kind."), words=400))


@pytest.fixture
def usual_positions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """transformers' own rotary positions, whatever a program in this process has put in their place, now or before."""
    from transformers.models.qwen2 import modeling_qwen2

    present = modeling_qwen2.apply_rotary_pos_emb
    usual: Callable[..., Any] = getattr(present, "original", present)
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", usual)
    return usual


def alone(*, ranks: int = 1) -> Any:
    """The runtime of a rank on the CPU that meets no other."""
    from ascendrun.programs.devices.accelerator import open_accelerator
    from ascendrun.programs.trainer.runtime import Runtime

    return Runtime(0, 0, ranks, None, open_accelerator("cpu", 0))


def options_of(program: str, *given: str) -> dict[str, Any]:
    """What the program reads of this command line."""
    from ascendrun.programs.trainer.options import parse, read_table

    return parse(given, read_table(REPO / "ascendrun" / "programs" / program / "options.json"))


def dna_in(tokens: Iterable[int]) -> str:
    """The DNA of the codons among the tokens of a codon model."""
    from ascendrun.programs.codon.vocabulary import CODONS, FIRST_CODON

    return "".join(CODONS[token - FIRST_CODON] for token in tokens if token >= FIRST_CODON)


def tiny_qwen2(**changes: Any) -> Any:
    """A Qwen2 of 17 words with our attention, the same each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ascendrun.programs.devices import attention

    sizes = {"vocab_size": 17, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention.register()}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, **heads, **changes}))


class Server:
    """The forking process, asked over its pipes."""

    def __init__(self, script: Path, environ: dict[str, str]) -> None:
        # inductor's cache of graphs does not know for which vectors (ATEN_CPU_CAPABILITY) it compiled them.
        self.compiled = tempfile.TemporaryDirectory(prefix="ascendrun-inductor-")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **environ,
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": self.compiled.name,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes that import torch, for two kernels
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.compiled.cleanup()


class Run:
    """One start of the program on some ranks, in a folder of its own."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        options: Sequence[str],
        ranks: int,
        rank_env: dict[int, dict[str, str]],
        folders: Sequence[Path],
        program: str = "trajectory",
        stop: tuple[int, int] | None = None,
    ) -> None:
        self.server, self.folder = server, folder
        folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self.out = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        self.metrics_files = [folder / f"rank-{rank}.metrics" for rank in range(ranks)]
        self.error_files = [folder / f"rank-{rank}.error" for rank in range(ranks)]
        self.pids: list[int] = []
        for rank in range(ranks):
            env = {
                "ASCENDRUN_METRICS_FILE": str(self.metrics_files[rank]),
                "ASCENDRUN_CHECKPOINT_DIR": str(folder / "ckpt"),
                "TORCHELASTIC_ERROR_FILE": str(self.error_files[rank]),
            }
            if ranks > 1:
                env.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
            if stop is not None and rank == stop[0]:
                env["STOP_AFTER"] = json.dumps([stop[1], str(self.metrics_files[0])])
            env.update(rank_env.get(rank, {}))
            at = folders[rank] if folders else folder
            self.pids.append(
                server.ask(
                    {
                        "program": program,
                        "argv": list(options),
                        "env": env,
                        "folder": str(at),
                        "out": str(self.out[rank]),
                    }
                )
            )

    def wait(self) -> list[int]:
        """The exit codes of all ranks; fails when one does not end in time."""
        codes: list[int | None] = []
        await_that(lambda: self._all_ended(codes), lambda: f"ranks still run, {codes}:\n{self.text()}")
        return [code for code in codes if code is not None]

    def _all_ended(self, codes: list[int | None]) -> bool:
        codes[:] = [self.server.ask({"poll": pid}) for pid in self.pids]
        return None not in codes

    def succeed(self) -> Run:
        codes = self.wait()
        assert codes == [0] * len(codes), self.text()
        return self

    def until_step(self, step: int) -> None:
        """Waits until rank 0 has reported this step."""
        await_that(lambda: any(line.get("step", 0) >= step for line in self.metrics()), self.text)

    def serving(self) -> dict[str, Any]:
        """Waits until rank 0 serves, and returns what it reports then."""

        def lines() -> list[dict[str, Any]]:
            return [line for line in self.metrics() if line.get("event") == "serving"]

        await_that(lambda: bool(lines()), self.text)
        return lines()[0]

    def kill(self) -> None:
        """Ends what still runs."""
        for pid in self.pids:
            if self.server.ask({"poll": pid}) is None:
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        os.kill(self.pids[rank], number)

    def killed_at(self, step: int, *ranks: int) -> list[int]:
        """Kills these ranks, in this order, once rank 0 has reported the step. The exit codes of all."""
        self.until_step(step)
        for rank in ranks:
            self.signal(rank, signal.SIGKILL)
        return self.wait()

    def text(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in self.out if path.exists())

    def metrics(self, rank: int = 0) -> list[dict[str, Any]]:
        if not self.metrics_files[rank].exists():
            return []
        whole = self.metrics_files[rank].read_text().split("\n")[:-1]
        return [json.loads(line) for line in whole]

    def losses(self) -> dict[int, float]:
        return self.numbers("loss")

    def numbers(self, name: str) -> dict[int, float]:
        """A metric of rank 0, by step."""
        return {line["step"]: line[name] for line in self.metrics() if name in line}

    def final(self) -> dict[str, list[float]]:
        """The weights that tinyprogram ended with."""
        import torch

        return {name: tensor.flatten().tolist() for name, tensor in torch.load(self.folder / "final.pt").items()}

    def weights(self, name: str = "") -> dict[str, Any]:
        """Of the model that it wrote, in the directory `name` of its output."""
        from safetensors.torch import load_file

        stored = load_file(self.folder / "out" / name / "model.safetensors")
        return {key: tensor.tolist() for key, tensor in stored.items()}

    def give(self, step: int, folder: Path) -> None:
        """Copies the checkpoint of a step to where a run in `folder` resumes from it."""
        shutil.copytree(self.folder / "ckpt", folder / "ckpt")
        for place in (folder / "ckpt").glob("step-*"):
            if int(place.name.split("-")[1]) != step:
                shutil.rmtree(place)

    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "out" / "report.json").read_text()))


def resharded(straight: Run, begin: Callable[..., Run], ways: dict[int, Any]) -> Run:
    """The last run of those that begin(way, name=…) starts, each at this step of the one before, with its losses."""
    before = straight
    for step, way in ways.items():
        before.give(step, before.folder.with_name(f"from-{step}"))
        before = begin(way, name=f"from-{step}").succeed()
        assert min(before.losses()) == step + 1
    assert before.losses() == pytest.approx({step: straight.losses()[step] for step in before.losses()}, rel=1e-5)
    return before


Start = Callable[..., Run]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Server]:
    environ = {**os.environ, "PYTHONPATH": str(REPO), "DS_ACCELERATOR": "cpu"}
    server = Server(Path(__file__).with_name("forkserver.py"), environ)
    yield server
    server.close()


@pytest.fixture(scope="session")
def tiny_once(fork_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """tiny_once(option=value…): a training of `tinyprogram` on two ranks that ended well, for several tests."""

    def run(**options: Any) -> Run:
        folder = tmp_path_factory.mktemp("once")
        return Run(fork_server, folder, [json.dumps(options)], 2, {}, (), "tiny").succeed()

    return run


@pytest.fixture
def launch(fork_server: Server, tmp_path: Path) -> Iterator[Start]:
    """launch(program, options, name=…, ranks=1): the same name goes on in the same folder. `rank_env`: more variables
    by rank; `folders`: a working folder for each rank instead of a common one; `stop`: (rank, step) of a rank that is
    asked to stop after this step. Nothing outlives the test."""
    runs: list[Run] = []

    def begin(
        program: str,
        options: Sequence[str],
        *,
        name: str = "run",
        ranks: int = 1,
        rank_env: dict[int, dict[str, str]] | None = None,
        folders: Sequence[Path] = (),
        stop: tuple[int, int] | None = None,
    ) -> Run:
        runs.append(Run(fork_server, tmp_path / name, options, ranks, rank_env or {}, folders, program, stop))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture
def start(launch: Start) -> Start:
    """start(*options, ranks=1, name="run"): a tiny training of the trajectory program."""
    return lambda *options, **how: launch("trajectory", [*TINY, *options], **how)


@pytest.fixture
def tiny(launch: Start) -> Start:
    """tiny(ranks=1, name="run", option=value…): a training of `tinyprogram`."""

    def begin(
        *,
        ranks: int = 1,
        name: str = "run",
        rank_env: dict[int, dict[str, str]] | None = None,
        folders: Sequence[Path] = (),
        **options: Any,
    ) -> Run:
        return launch("tiny", [json.dumps(options)], name=name, ranks=ranks, rank_env=rank_env, folders=folders)

    return begin


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small: two threads on two busy cores mostly wait for each other."""
    torch: Any = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    if before:
        torch.set_num_threads(1)
    yield
    if before:
        torch.set_num_threads(before)
