"""A rank that does nothing, standard library only: says that it lives, then waits for its end."""

import os
import signal
import time

if __name__ == "__main__":
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    os.write(1, (f"[FIRST {rank} {time.time():.6f}]\n").encode())  # one write: it arrives whole or was torn apart
    while True:
        signal.pause()
