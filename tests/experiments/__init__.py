"""The experiments: each in seconds, and its tables and figures."""
