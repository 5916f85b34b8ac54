"""Where the optimal learning rate lies, by sizes, optimizer, weight decay, batch size and number of steps."""
