"""What binds at 100 and at 1,000 machines: docs/scaling.md."""
