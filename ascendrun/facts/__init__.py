"""What the agent, the planner and the ranks read alike: rows of data, columns, headers of files, chips.

Python 3.7, standard library only, and nothing else of ours: the agent has it on every node.
"""
