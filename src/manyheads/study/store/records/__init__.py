"""Units of a run in format 2: schemas, segments of a run at work, the table of a finished one."""
