"""Studies of attention beside pooling and recurrence: recall of ordered symbols, and costs."""
