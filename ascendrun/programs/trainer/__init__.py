'''The trainer of the bundled programs. A program provides its options, a model and a Task; the rest is here:

    options        the options table, read before torch is imported     runtime        one rank: run(body), its end
    devices        npu, cuda or cpu behind one interface, fused ops     distributed    the ranks: sum, gather, share
    attention      one function for all devices                 shards, rows   data encoded once, mapped by all ranks
    data           selection of the samples of a step; loader; packing  strategies     ddp, fsdp2, hsdp, zero3 -> Engine
    optim          groups of weights, AdamW, Muon, sharded states       schedule       rates as functions of the step
    task           Task, Settings, Ending, the errors                   loop           Loop: resume, run, load_best
    saver          checkpoints in the background (format: checkpoint)   metrics        time of a step, FLOPs, MFU
    source         batches from a plan, or rollouts of the model        resume         progress, checkpoints, best model
    packing        several samples in one sequence, exactly             profiling      a trace of a few steps
    batch_finder   the largest micro-batch that fits                    dry_run        check that batches divide
    errors         ProgramError; errors of the machine                  checkpoint     files that are complete or absent
    strategies.compiled   layers compiled by torch or torchair

A complete program, `train.py`:

    class Lines(Task):
        """Next-token prediction over rows of token ids."""
        def __init__(self, rows, here): self.rows, self.here = rows, here

        def collate(self, units, step):                   # on the CPU, during the training; no global generators
            rows = [self.rows[number] for unit in units for number in unit]
            ids, labels = data.pad(rows, value=0), data.pad(rows, value=-100)
            return Batch({"ids": ids, "labels": labels}, weight=float((labels[:, 1:] >= 0).sum()),
                         tokens=sum(map(len, rows)), samples=len(rows))

        def loss(self, model, tensors):                   # summed: the loop divides by the weight of all ranks
            logits = model(input_ids=tensors["ids"]).logits[:, :-1].float()
            return functional.cross_entropy(logits.flatten(0, 1), tensors["labels"][:, 1:].flatten(), reduction="sum")

    def train(options, here):                               # `here`: Runtime, this rank
        rows = read_rows(options["data_path"])
        plan = data.Buckets([len(row) for row in rows], batch_size=options["global_batch_size"], seed=options["seed"])
        precision = accelerator.choose_precision(options["dtype"], here.accelerator)
        here.log(precision.reason)
        steps = options["num_train_epochs"] * plan.steps_per_epoch
        rate = schedule.scaled(options["learning_rate"], schedule.cosine(steps, warmup=100))
        engine = wrap(make_model(), here, make_optimizer=lambda model: optim.adamw(model, rate), precision=precision)
        settings = Settings.of(options, steps=steps)
        loop = Loop(here, engine, plan, Lines(rows, here), settings, runtime.checkpoint_folder(options["output_dir"]),
                    identity={name: options[name] for name in ("seed", "learning_rate", "global_batch_size")})
        loop.resume(options["resume_from_checkpoint"])      # auto, never or a path; False: from step 0
        if not loop.run().is_complete:                      # stopped by a signal: saved; the same command resumes
            return
        loop.load_best()                                    # into engine.module, when Settings.best names a score

    runtime.run(lambda here: train(options, here))     # ends the process

Random numbers of a step follow from (seed, step, rank), the order of samples from (seed, step): on a CPU, a resumed run
equals an uninterrupted run to the last bit. The batch size is that of all ranks together: a training may
resume with another number of ranks or in another strategy (equal except for rounding). For zero3 it is an error.
'''
