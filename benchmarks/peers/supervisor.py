"""DEPTH RANKS COMMAND...: DEPTH Pythons, each started by the one before; the last starts the ranks of its node."""

import os
import subprocess
import sys

if __name__ == "__main__":
    depth, count, *command = sys.argv[1:]
    if int(depth) > 1:
        sys.exit(subprocess.call([sys.executable, __file__, str(int(depth) - 1), count, *command]))
    first = int(os.environ["SLURM_NODEID"]) * int(count)
    ranks = [subprocess.Popen(command, env={**os.environ, "RANK": str(first + number)}) for number in range(int(count))]
    sys.exit(max(rank.wait() for rank in ranks))
