"""Gates: what moves the attention of all heads by a known amount, so that heads are told apart."""
