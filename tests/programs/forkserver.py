"""Imports torch and transformers once, then forks one process for each rank asked for: 0.1 s instead of 4 s a rank.

Reads JSON lines from standard input and answers each with one: {"program", "argv", "env", "folder", "out"} starts a
rank and gives its pid; {"import": module} imports it for all later ranks; {"poll": pid} gives a rank's exit code,
minus the signal, or null while it runs. At the end of input it kills what still runs.

A rank whose variable STOP_AFTER is [step, metrics file] sends itself SIGTERM once the file has that step: nobody who
watches from outside is sure to be in time.
"""

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401  # AdamW would import it in every child
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

PROGRAMS = {
    "trajectory": ("ascendrun.programs.trajectory.__main__", "ascendrun.programs.trajectory.stages.training"),
    "meshtest": ("ascendrun.programs.meshtest.__main__",),
    "nanochat": ("ascendrun.programs.nanochat.__main__", "ascendrun.programs.nanochat.base"),
    "threesteps": ("tests.programs.nanochat.threesteps",),
    "codon": ("ascendrun.programs.codon.__main__", "ascendrun.programs.codon.train"),
    "tiny": ("tinyprogram",),
    "lightning": ("tinylightning",),
    "lightning-file": ("runfile", "tinylightning", "ascendrun.programs.codon.train"),
    "lastwords": ("lastwords",),
    "sums": ("sums",),
    "file": ("runfile", "ascendrun.programs.trainer.loop"),
    "generating": ("tests.programs.generating", "deepspeed"),
    "reduced": ("reduced",),
    "memory": ("benchmarks.memory.rank",),
    "loading": ("baseloader", "peft", "deepspeed"),
    "qwen_lora": ("ascendrun.programs.qwen_lora.__main__", "ascendrun.programs.qwen_lora.modes", "peft", "deepspeed"),
}
"""By name: the module with `main`, and what it would import in every rank. Imported when first asked for."""


def start(request: dict[str, Any]) -> int:
    for module in PROGRAMS[request["program"]]:
        importlib.import_module(module)
    gc.freeze()  # a search for garbage in a rank passes over what was imported
    pid = os.fork()
    if pid == 0:
        run(request)
    return pid


def stop_after(step: int, metrics: str) -> None:
    mark = f'"step": {step},'
    while not Path(metrics).exists() or mark not in Path(metrics).read_text():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


def run(request: dict[str, Any]) -> NoReturn:
    log = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if "STOP_AFTER" in os.environ:
        threading.Thread(target=stop_after, args=json.loads(os.environ.pop("STOP_AFTER")), daemon=True).start()
    try:
        importlib.import_module(PROGRAMS[request["program"]][0]).main(request["argv"])
    except SystemExit as error:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)
    os._exit(99)  # the program must end its process itself


def serve() -> None:
    codes: dict[int, Any] = {}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # some modules print when they are imported
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if "import" in request:
            answer: Any = importlib.import_module(request["import"]).__name__
        elif "argv" in request:
            answer = start(request)
            codes[answer] = None
        else:
            answer = codes[request["poll"]]
            if answer is None:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                if pid:
                    answer = codes[pid] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        print(json.dumps(answer), file=answers)
    for pid in [pid for pid, code in codes.items() if code is None]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
