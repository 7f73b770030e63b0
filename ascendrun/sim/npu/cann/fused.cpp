// The NPU's own operators that ascendrun's programs use, each as the formula it stands for.
