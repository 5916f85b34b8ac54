"""Live recording: attention statistics and update sizes of a training while it runs, within a share of its time."""
