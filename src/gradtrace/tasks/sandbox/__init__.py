"""Running code that a model wrote.

    trainer ──▶ keeper ──▶ jail: candidate.py    the model's code; is asked for values and never sees a verdict
                   └─────▶ jail: examiner.py     the tests; asks for values and decides

`linux` has the system calls and the filter on those of a program, `jail` builds what a program sees, `program` starts
and ends one, `service` judges.
"""

SERVICE = "gradtrace.tasks.sandbox.service:create"
"""What a keeper runs."""
PAYLOAD, CHANNEL = 3, 4
"""Descriptors that a program starts with, beside 0 and 1."""
PASSED, FAILED, NOTHING_ASSERTED, NOTHING_ASKED = b"1", b"0", b"2", b"3"
"""What an examiner says of a test: the last two ended well, but no assertion has held, or the program was not asked."""
NO_ASSERTION = "no assertion"
"""Why a program failed whose tests ended well without an assertion that held."""
PATIENCE = 10
"""A program is given up after this many times its limit on the clock, on a machine that is busy with other things."""


def missing_isolation() -> str:
    """Why this machine cannot isolate programs, as the kernel said it; empty if it can."""
    from gradtrace.tasks.verification.pool import WorkerPool

    with WorkerPool(SERVICE, workers=1) as pool:
        (reply,) = pool.map([{"kind": "isolation", "timeout": 60.0}])
    return str(reply.get("missing", "its worker process died"))
