"""The training loop of the bundled programs. A program brings its options, a model and a Task; the rest is here:

    options        the options table, read before torch is imported     runtime        one rank: run(body), its end
    distributed    the ranks: sum, gather, share                        loop           Loop: resume, run, load_best
    task           Task, Settings, Ending                               data           the samples of a step; rollouts
    shards         data encoded once, mapped by all ranks; rows of one length
    optim          groups of weights, AdamW, Muon, sharded states       schedule       rates as functions of the step
    strategies     ddp, fsdp2, hsdp, zero3 -> Engine; compilation       metrics        time of a step, MFU, traces
    resume         progress, checkpoints, best model                    saver          checkpoints in the background
    checkpoint     files that are complete or absent, and whose they are

The devices are in programs/devices. docs/trainer-api.md has a complete program.

The order of samples follows from (seed, step), dropout from (seed, step, sample), other random numbers of a step from
(seed, step, rank): on a CPU, a resumed run equals an uninterrupted run to the last bit. The batch size is that of all
ranks together: a training may resume with another number of ranks or in another strategy (equal except for rounding).
"""
