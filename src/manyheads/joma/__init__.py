"""Joint dynamics of MLP and attention: conserved relations, who wins, entropy and rank, latent trees (Tian et al.)."""
