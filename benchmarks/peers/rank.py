"""A rank that does nothing, standard library only: says that it lives, then waits for its end."""

import os
import signal
import time

if __name__ == "__main__":
    rank = next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ)
    os.write(1, (f"[FIRST {rank} {time.time():.6f}]\n").encode())  # one write: it arrives whole or was torn apart
    while True:
        signal.pause()
