"""Every numbered formula of docs/theory.md beside a run that it should predict."""
