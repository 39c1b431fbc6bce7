"""The report of one run or several: one pass over each trace, one plain dict of numbers, one page that draws it."""
