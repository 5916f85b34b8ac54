"""The lecture's questions as studies: what pooling cannot see, and what attention costs."""
