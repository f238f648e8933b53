"""Running code that a model wrote.

    trainer ──▶ keeper ──▶ jail: candidate.py    the model's code; is asked for values and never sees a verdict
                   └─────▶ jail: examiner.py     the tests; asks for values and decides

`linux` has the system calls, `jail` builds what a program sees, `program` starts and ends one, `service` judges.
"""

SERVICE = "gradtrace.tasks.sandbox.service:create"
"""What a keeper runs."""


def missing_isolation() -> str:
    """Why this machine cannot isolate programs, as the kernel said it; empty if it can."""
    from gradtrace.tasks.verification.pool import WorkerPool

    with WorkerPool(SERVICE, workers=1) as pool:
        (reply,) = pool.map([{"kind": "isolation", "timeout": 60.0}])
    return str(reply.get("missing", "its worker process died"))
