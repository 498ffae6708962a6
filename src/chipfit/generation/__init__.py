"""Calibration data made from what a network learned: images whose statistics are those of its batch norms."""
