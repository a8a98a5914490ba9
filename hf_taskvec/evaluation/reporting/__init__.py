"""Step 3, second half: the report of a sweep as a value, as tables, plots and HTML."""
