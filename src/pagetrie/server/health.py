"""Whether the server lives, and whether it should be sent requests, with reasons.

Both are open to everybody, so the reasons name no paths, addresses or tenants; the log has those.
"""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from pagetrie.server.context import ServerContext


def health(context: ServerContext) -> Response:
    """Alive: the engine's thread runs and takes requests. Who restarts servers asks here."""
    if context.stopping:
        return JSONResponse({"status": "stopping"}, 503)
    if not context.loop.is_alive():
        return JSONResponse({"status": "dead"}, 503)
    return JSONResponse({"status": "ok"})


def ready(context: ServerContext) -> Response:
    """Ready: the model is loaded and steps are made. A tier that fails only makes it slower: degraded, and still 200.

    Who spreads requests over servers asks here.
    """
    checks = {"model": "ok", "steps": "ok"}  # without a model nothing is listened to
    reasons: list[str] = []
    if context.stopping:
        checks["steps"] = "failed"
        reasons.append("the server is shutting down")
    elif not context.loop.is_alive():
        checks["steps"] = "failed"
        reasons.append("the engine's thread isn't running")
    elif (still := context.loop.stands_still()) > context.stuck_after:
        checks["steps"] = "failed"
        reasons.append(f"no step has ended for {still:.0f} s, though requests wait (limit: {context.stuck_after:g} s)")
    report = context.loop.transfer_report()
    for name, stats in (report.tiers if report is not None else {}).items():
        checks[name] = "ok" if stats.healthy else "degraded"
        if not stats.healthy:
            reasons.append(f"the {name} tier is not used in full: {stats.problem or 'see the log'}")
    status = "unready" if "failed" in checks.values() else "degraded" if reasons else "ready"
    return JSONResponse({"status": status, "reasons": reasons, "checks": checks}, 503 if status == "unready" else 200)
