"""Methods that round weights, one a file, found by the name that `Settings(rounding=...)` takes."""
