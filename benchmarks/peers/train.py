"""A training that continues from its newest checkpoint: python train.py FOLDER.

All ranks sum a tensor in each step; a sum that is not answered for LIMIT_S is an error, as under HCCL's and NCCL's
limits. Rank 0 saves each tenth step into FOLDER, which all hosts share, prints steps as nanoGPT does, and records in
FOLDER/steps.jsonl when each start began, from which step, and when each of its steps was done. All ranks report their
steps by `ascendrun.log` where that is there: hangs are detected by them. TRAIN_DEVICE=npu: over HCCL, else over gloo.
"""

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

try:
    import ascendrun
except ImportError:  # under another launcher
    ascendrun = None  # type: ignore[assignment]


IS_NPU = os.environ.get("TRAIN_DEVICE") == "npu"
LIMIT_S = float(os.environ.get("TRAIN_LIMIT_S", "120"))
STEP_S = 0.1
SAVE_STEPS = 10


def main(folder: str) -> None:
    rank, start_s = int(os.environ["RANK"]), time.time()
    os.write(1, (f"[FIRST {rank} {start_s:.6f}]\n").encode())
    device = torch.device("cpu")
    if IS_NPU:
        import torch_npu

        device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
        torch_npu.npu.set_device(device)
    dist.init_process_group("hccl" if IS_NPU else "gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    saved = [int(name.rpartition("-")[2]) for name in os.listdir(folder) if name.startswith("step-")]
    known = torch.tensor([max(saved, default=0)], device=device)
    dist.broadcast(known, 0)
    first = step = int(known)
    while True:
        total = torch.ones(4, device=device)
        dist.all_reduce(total)
        assert float(total[0]) == dist.get_world_size()  # waits for the device too
        step += 1
        if ascendrun is not None:
            ascendrun.log(step=step, loss=1.0)
        if rank == 0:
            with open(os.path.join(folder, "steps.jsonl"), "a") as file:
                file.write(json.dumps({"start_s": start_s, "from": first, "step": step, "at_s": time.time()}) + "\n")
            print(f"iter {step}: loss 1.0000", flush=True)
            if step % SAVE_STEPS == 0:
                part = os.path.join(folder, f"part-{os.getpid()}")
                torch.save({"step": step}, part)
                os.replace(part, os.path.join(folder, f"step-{step}"))
        time.sleep(STEP_S)


if __name__ == "__main__":
    main(sys.argv[1])
