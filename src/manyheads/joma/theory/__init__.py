"""What the theory of joint MLP and attention dynamics predicts, one idea a file."""
