"""Step 4: the report of a sweep as a value, as tables and as plots."""
