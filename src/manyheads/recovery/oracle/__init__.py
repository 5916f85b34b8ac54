"""Query access to an attention layer: counted calls, cached answers, measured noise."""
