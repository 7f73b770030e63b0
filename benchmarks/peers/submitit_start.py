"""FOLDER NODES TASKS_PER_NODE COMMAND...: submits the command by submitit, and prints what its tasks print."""

import os
import sys
import time

if __name__ == "__main__":
    import submitit

    folder, nodes, tasks, *command = sys.argv[1:]
    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(nodes=int(nodes), ntasks_per_node=int(tasks), time=10)
    job = executor.submit(submitit.helpers.CommandFunction(command, verbose=True))
    shown = [0] * (int(nodes) * int(tasks))
    while True:
        for task in range(len(shown)):
            text = job.task(task).stdout() or ""
            os.write(1, text[shown[task] :].encode())
            shown[task] = len(text)
        time.sleep(0.1)
