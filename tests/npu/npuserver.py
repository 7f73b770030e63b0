"""The programs' forking process with the real torch_npu, and the checks of this folder as one more program."""

import forkserver
import torch
import torch_npu  # noqa: F401

if __name__ == "__main__":
    assert not torch.npu.is_initialized(), "a forked child could not use the device any more"
    forkserver.PROGRAMS["check"] = ("checks",)
    forkserver.serve()
