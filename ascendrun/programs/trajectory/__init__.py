"""Ship classification from motion: AIS points become tokens, which a small Qwen2 classifies."""
