"""LoRA fine-tuning of Qwen models on instructions, with a curriculum by optimizer step, over any number of devices."""
