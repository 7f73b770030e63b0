"""Rules, memory and cost of a training before it starts, from facts of the nodes. No torch.

Pure: the head node uses it for `plan`, `submit` and `submit --dry-run`, the programs use the same tables on a rank.
"""
