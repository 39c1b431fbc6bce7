"""Results of runs: comparison tables and figures, the report page, and the live view. All of it comes from traces."""
