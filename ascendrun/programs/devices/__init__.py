"""The device of a rank, npu, cuda or cpu: its memory and precisions, attention and the fused operators of each."""
