"""The tables of README.md and docs/results.md, from committed results and published figures alone."""
