"""What a plan assumes of a model that cannot be traced: its parameters, and a bound for its activations."""

from __future__ import annotations

from trainwright.planning.trace.request import Regime, TraceRequest
from trainwright.planning.trace.units import ModelTrace, Size


def trace_or_bound(request: TraceRequest, regime: Regime) -> ModelTrace[Size]:
    """Trace the model of a request, or return a bound."""
    from trainwright.planning.trace.tracing import trace

    return trace(request, regime)
