"""Whole models against the clock: what `bench_models.py` and the scripts of `paper/` share.

`case` says what a model to be measured is, `hand` is the attention that an expert would write into
it, `measuring` turns a case and a variant into a row, `running` gives every row a process of its
own, `writing` keeps rows, `figure` draws them.
"""
