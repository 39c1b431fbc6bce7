"""Studies: one folder each, from a run to a figure and a text."""
