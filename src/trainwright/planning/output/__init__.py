"""A plan for people: a table and a chart."""
