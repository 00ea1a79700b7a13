"""Cleans a corpus: repairs and filters text, removes duplicates and evaluation texts, and reports what was removed and
why.

    from colonnade.data.refine.run import Executor, run
    report = run(["texts"], "clean", Recipe(), Executor(workers=4))

datatrove (the extra ``corpus``) runs the stages, in ``steps`` and ``run`` only; its Local, Slurm and Ray executors
distribute, log and resume them. The result depends neither on the number of workers nor on the order of the files.
"""
