"""ascendrun: start, watch and repair distributed training on Ascend NPU clusters over plain SSH."""

__version__ = "0.1.0"
