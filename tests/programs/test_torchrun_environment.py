"""The environment of a rank that the agent starts, held against the one that this machine's torchrun gives."""

import json
import subprocess
import sys

from ascendrun.core.rank_env import NodeShare, rank_environment

FROM_THE_LOGIN = {"PATH", "HOME", "LC_CTYPE", "PWD", "SHLVL", "_"}
FROM_THE_AGENT = {"MASTER_PORT"}
TOLD_TO_TORCHRUN_ITSELF = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_torchrun_sets_nothing_that_we_forget(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import json, os\nprint('ENV' + json.dumps(dict(os.environ)))\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--nproc-per-node=1",
            "--master-addr=127.0.0.1",
            "--master-port=0",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("ENV"))
    theirs = {name for name in json.loads(line[3:]) if not name.startswith("KMP_")}
    node = NodeShare(
        job="j",
        attempt=1,
        run_id="j.1",
        signal="TERM",
        env={},
        node_rank=0,
        nodes=1,
        world_size=1,
        local_world_size=1,
        ranks_before=0,
        interface="lo",
        master_address="127.0.0.1",
        device_type="cpu",
        device_ids=(0,),
        threads=1,
        attempt_folder="/a",
        checkpoint_folder="/c",
    )
    ours = set(rank_environment(node, 0))
    assert theirs - FROM_THE_LOGIN - FROM_THE_AGENT - TOLD_TO_TORCHRUN_ITSELF <= ours
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} <= theirs, "this is torchrun's environment"
