"""The local engine: worker processes on one machine. docs/engines.md describes how it works."""
