"""Output-value circuits: their sum, what heads read at probes, ranks, and the projections of all heads."""
