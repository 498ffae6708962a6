"""Which layer hurts, and which widths to choose: losses of widths from one backward pass, and an integer program."""
