"""One rank of a run: its device, its process group, its signals, its metrics, and an ending that does not hang."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, List, Mapping, NoReturn, Optional, TextIO, Tuple, Type, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
STOP_SIGNALS = ("TERM", "USR1", "INT")
DRAIN_S = 0.05
"""gloo's threads need a moment after the last collective: without it 7 of 12 runs hung in their destructors."""


@dataclass
class Runtime:
    """This rank among its peers. `control`: a group that carries CPU tensors and Python objects, None: alone."""

    rank: int
    local_rank: int
    world_size: int
    family: str
    device: torch.device
    control: Optional[dist.ProcessGroup]
    metrics: Optional[TextIO]
    stop_asked: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints from rank 0 only."""
        if self.is_first:
            print(text, flush=True)

    def record(self, **values: Any) -> None:
        """Appends one line to the metrics file; does nothing where none is wanted."""
        if self.metrics is not None:
            self.metrics.write(json.dumps(values) + "\n")
            self.metrics.flush()

    def any_stop(self) -> bool:
        """True on every rank as soon as one rank was asked to stop. All ranks must call it together."""
        if self.control is None:
            return self.stop_asked
        flag = torch.tensor([int(self.stop_asked)], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return bool(flag.item())

    def sum(self, values: List[float]) -> List[float]:
        """Sums over ranks, equal to the last bit on each."""
        if self.control is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def gather(self, value: T) -> List[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.control is None:
            return [value]
        values: List[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: T) -> T:
        """Rank 0's value on every rank; tensors inside dicts and lists travel as tensors, not pickled."""
        if self.control is None:
            return value
        tensors: List[torch.Tensor] = []
        outline = [take_tensors(value, tensors) if self.is_first else None]
        dist.broadcast_object_list(outline, src=0, group=self.control)
        return put_tensors(outline[0], lambda like: self._share_tensor(like, tensors))  # type: ignore[no-any-return]

    def _share_tensor(self, like: "TensorPlace", tensors: List[torch.Tensor]) -> torch.Tensor:
        tensor = tensors[like.index] if self.is_first else torch.empty(like.shape, dtype=like.dtype)
        dist.broadcast(tensor, src=0, group=self.control)
        return tensor


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor while its outline travels."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


def take_tensors(value: Any, tensors: List[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return TensorPlace(len(tensors) - 1, value.shape, value.dtype)
    if isinstance(value, dict):
        return {key: take_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [take_tensors(item, tensors) for item in value]
    return value


def put_tensors(value: Any, make: Callable[[TensorPlace], torch.Tensor]) -> Any:
    if isinstance(value, TensorPlace):
        return make(value)
    if isinstance(value, dict):
        return {key: put_tensors(item, make) for key, item in value.items()}
    if isinstance(value, list):
        return [put_tensors(item, make) for item in value]
    return value


def choose_family(wanted: str, environ: Mapping[str, str]) -> str:
    """npu, cuda or cpu: as the option says, else as the launcher says, else what this process can see."""
    for choice in (wanted, environ.get("ASCENDRUN_FAMILY", "auto")):
        if choice != "auto":
            return choice
    if environ.get("ASCEND_RT_VISIBLE_DEVICES"):
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(family: str, local_rank: int) -> torch.device:
    """This rank's device, made current. Raises RuntimeError naming what is missing."""
    if family == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 0:
            torch.set_num_threads(int(threads))
        return torch.device("cpu")
    if family == "npu":
        try:
            import torch_npu  # noqa: F401  # registers the device
        except ImportError as error:
            raise RuntimeError(f"device family npu needs torch_npu, which cannot be imported ({error}); install the "
                               "torch_npu that belongs to this torch, or use devices.family: cpu") from error
    device = torch.device(family, local_rank)
    getattr(torch, family).set_device(device)
    return device


def start(*, family: str = "auto", timeout_s: float = 600.0) -> Runtime:
    """Joins the run that the environment describes; without RANK and WORLD_SIZE this process is alone."""
    environ = os.environ
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    family = choose_family(family, environ)
    device = open_device(family, local_rank)
    control = join(rank, world, family, timeout_s) if world > 1 else None
    path = environ.get("ASCENDRUN_METRICS")
    metrics = open(path, "a", encoding="utf-8") if path else None
    runtime = Runtime(rank, local_rank, world, family, device, control, metrics)
    listen_for_stop(runtime)
    return runtime


def join(rank: int, world: int, family: str, timeout_s: float) -> dist.ProcessGroup:
    """Initialises torch.distributed; returns the group for CPU tensors.

    The keys carry the restart count: torchrun keeps one store over restarts, and new ranks would
    read the addresses of the dead ones.
    """
    environ = os.environ
    timeout = timedelta(seconds=timeout_s)
    agent_has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world, rank == 0 and not agent_has_store, timeout=timeout)
    prefix = f"ascendrun-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group(BACKENDS[family], store=own, rank=rank, world_size=world, timeout=timeout)
    group = dist.group.WORLD if family == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    # Rank 0 holds the store: were it to fail before all have joined, its peers would tell of a lost store only.
    dist.barrier(group=group)
    return group


def listen_for_stop(runtime: Runtime) -> None:
    """The checkpoint signal asks for a stop after the current step; a second ^C ends the process at once."""
    def note(number: int, frame: object) -> None:
        runtime.stop_asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    own = os.environ.get("ASCENDRUN_CHECKPOINT_SIGNAL") or "TERM"
    for name in {*STOP_SIGNALS, own[3:] if own.startswith("SIG") else own}:
        signal.signal(getattr(signal, "SIG" + name), note)


def run(body: Callable[[Runtime], None], *, family: str = "auto", timeout_s: float = 600.0,
        expected: Tuple[Type[Exception], ...] = ()) -> NoReturn:
    """Runs `body` as this rank and ends the process: code 0, or 1 with the error written where torch elastic looks.

    `expected`: errors whose message says all that a person needs; the others are shown with their traceback.
    """
    try:
        runtime = start(family=family, timeout_s=timeout_s)
        body(runtime)
        leave(runtime)
    except BaseException as error:  # whatever it was, the process must end here and say why
        write_error_file(error)
        if isinstance(error, expected):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        end_process(1)
    end_process(0)


def leave(runtime: Runtime) -> None:
    """The ending for a rank whose work is done: everyone meets, the network drains, then the groups go."""
    if runtime.metrics is not None:
        runtime.metrics.close()
    if runtime.control is None:
        return
    dist.barrier(group=runtime.control)
    time.sleep(DRAIN_S)
    dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Past the interpreter's own teardown, where gloo and hccl threads can wait for each other for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error_file(error: BaseException) -> None:
    """Torch elastic's error file, so that the launcher can name this rank and its reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = {"message": f"{type(error).__name__}: {error}",
               "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError as problem:
        print(f"cannot write {path}: {problem}", file=sys.stderr)
