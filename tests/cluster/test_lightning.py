"""A Lightning script on two virtual hosts whose Python has no ascendrun: its ranks import the staged plugin."""

import json
import os
import sysconfig
from typing import Any

import pytest
from scenes import Scene, await_that, venv_python

from tests.lib.vcluster.cluster import VirtualCluster

if os.environ.get("CI") != "true":
    pytest.importorskip("pytorch_lightning", reason="bin/setup-env lightning")

Ascendrun = Any

TRAIN = """
import json, pytorch_lightning as pl, torch
import ascendrun.lightning as plugin

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []
    def training_step(self, batch, number):
        self.seen.append([self.trainer.current_epoch, batch.tolist()])
        return self.layer(batch[:, None].float()).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

trainer = pl.Trainer(
    **plugin.settings(), max_epochs=2, log_every_n_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
model = Model()
trainer.fit(model, torch.utils.data.DataLoader(torch.arange(32), batch_size=4, shuffle=True))
facts = {"rank": trainer.global_rank, "world": trainer.world_size, "file": plugin.__file__, "seen": model.seen}
print(json.dumps(facts))
"""


@pytest.mark.thorough
def test_ranks_of_two_hosts_have_the_plugin_without_ascendrun(ascendrun: Ascendrun, cluster: VirtualCluster) -> None:
    scene = Scene(ascendrun, cluster)
    (scene.folder / "code" / "train.py").write_text(TRAIN)
    more = (  # -S: libraries come from PYTHONPATH alone, so the checkout that this Python has installed is not there
        f"python: {venv_python()}\nenv: {{PYTHONPATH: {sysconfig.get_paths()['purelib']}, OMP_NUM_THREADS: 1}}\n"
    )
    job = scene.job("lightning", command=["python", "-S", "train.py"], more=more)
    scene.ascendrun("submit", job, timeout=500, code=0)
    await_that(lambda: scene.is_drained("j-0001"), "every byte is here")
    files = scene.on_head("j-0001", "rank-*.out.0")
    facts = [json.loads(line) for data in files.values() for line in data.decode().splitlines() if '"seen"' in line]
    facts.sort(key=lambda each: int(each["rank"]))
    assert [(each["rank"], each["world"]) for each in facts] == [(rank, 4) for rank in range(4)]
    assert all("/trees/" in each["file"] for each in facts), facts
    for epoch in range(2):
        rows = [row for each in facts for at, rows in each["seen"] if at == epoch for row in rows]
        assert sorted(rows) == list(range(32))
    listed = scene.ascendrun("ps", "-a", "-o", "json")
    (row,) = json.loads(listed.stdout)["jobs"]
    progress = row["progress"]
    assert progress["step"] == 4 and progress["loss"] > 0, row
