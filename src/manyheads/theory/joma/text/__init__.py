"""Small transformers on text: training record, summaries, pictures."""
