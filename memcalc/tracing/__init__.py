"""Models without a program of their own: transformers' real module, built without data and traced.

`program.py` replaces a family's program. Neither it nor `description.py` imports torch or transformers. `modules.py`
builds transformers' model, `step.py` runs it, `recorder.py` writes what torch allocates into memcalc's log. `values.py`
and `realism.py` make the traced run take the branches of a real run.
"""
