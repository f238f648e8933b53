"""Running code that a model wrote.

    trainer ──▶ keeper ──▶ jail: candidate.py    the model's code; is asked for values and never sees a verdict
                   └─────▶ jail: examiner.py     the tests; asks for values and decides

`linux` has the system calls, `jail` builds what a program sees, `program` starts and ends one, `service` judges.
"""
