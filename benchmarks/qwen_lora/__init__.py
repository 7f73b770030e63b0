"""Qwen2 of 0.5 billion weights by LoRA: tokens a second and memory, beside transformers' Trainer on the same rows."""
