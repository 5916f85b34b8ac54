"""Execution of a study: units of work, executors, assembly of the results."""
