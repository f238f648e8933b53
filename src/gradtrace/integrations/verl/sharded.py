from __future__ import annotations

from gradtrace.attribution import InfluenceTracer


class ShardedTracer(InfluenceTracer):
    pass
