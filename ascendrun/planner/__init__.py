"""What can be said about a training before it starts: rules, memory and cost, from facts of the nodes. No torch.

Pure: the head node uses it for `plan`, `submit` and `submit --dry-run`, the programs use the same tables on a rank.
"""
