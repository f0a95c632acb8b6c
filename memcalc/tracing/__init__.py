"""Models without a program of their own: transformers' real module, built without data and traced.

`program.py` stands where a family's program stands, and like `description.py` imports neither torch nor transformers.
`modules.py` builds transformers' model, `step.py` runs it, `recorder.py` writes what torch allocates into memcalc's log;
`values.py` and `realism.py` see to it that it goes the way of a real run.
"""
