"""The room of operators: one table with a row for each canonical operator, and every name that others have for it."""
