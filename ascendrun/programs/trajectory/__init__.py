"""Classifies ships by how they move: AIS points become tokens, a small Qwen2 reads them."""
