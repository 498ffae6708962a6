"""Which layer hurts, and which widths to choose: losses of every width from one backward pass, and an integer program."""
