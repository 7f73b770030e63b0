"""LoRA fine-tuning of Qwen models on instructions, with a curriculum by optimizer step, on any number of devices."""
