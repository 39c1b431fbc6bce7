"""Which traces this release writes and reads. One place, since a trace is read by several parts of the house."""

from __future__ import annotations

#: What is written. 2 added to 1: norms and the noise scale of an update, and the choices of a policy.
SCHEMA = 2
#: The oldest that is read.
OLDEST = 1


def why_not_readable(schema: object) -> str | None:
    """What is wrong with a trace of this schema, and what to do; None where it can be read."""
    if type(schema) is int and OLDEST <= schema <= SCHEMA:
        return None
    older = type(schema) is int and schema < OLDEST
    remedy = "use the release that wrote it" if older else "upgrade quorate, or record the run with this one"
    return f"has schema {schema}, but this quorate reads schemas {OLDEST} to {SCHEMA}; {remedy}"
