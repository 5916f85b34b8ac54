"""Help of the command line: text as wide as the terminal, descriptions of studies, completion of words."""
