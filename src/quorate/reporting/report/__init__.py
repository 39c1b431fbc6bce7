"""The report on runs: one pass over each trace gathers the data, one dictionary holds it, one page draws it."""
