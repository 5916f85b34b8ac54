"""In-context learning by an MLP under linear attention (Kim and Suzuki): two-timescale limit, particles, saddles."""
