"""Files of ExecuTorch, which the writer and the runtime share."""
