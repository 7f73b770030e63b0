"""The LoRA program on two nodes that share no disk."""

from __future__ import annotations


def test_every_node_has_the_base_that_the_program_made(launch, tmp_path):
    """Newer transformers write a model on rank 0 only, and the second node had none."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    run = launch(
        "qwen_lora",
        [
            "--data_path=generated",
            "--synthetic_samples=60",
            "--global_batch_size=4",
            "--max_steps=2",
            "--warmup_steps=1",
            "--cutoff_len=96",
            "--lora_r=2",
            "--num_sample_prompts=0",
            "--strategy=ddp",
        ],
        ranks=2,
        folders=nodes,
        rank_env={1: {"LOCAL_RANK": "0"}},
    ).succeed()
    files = [{path.name: path.read_bytes() for path in (node / "out" / "base").iterdir()} for node in nodes]
    assert files[0] == files[1] and {"config.json", "model.safetensors", "tokenizer.json"} <= set(files[0])
    assert run.losses()
