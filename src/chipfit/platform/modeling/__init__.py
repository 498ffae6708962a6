"""The Python way to describe a chip: classes under the names that users of the predecessors know, lowered to a `Platform`."""
