"""Keys of quantization parameters, and the least threshold of a quantizer."""

THRESHOLD, SIGNED, RANGE_MIN, RANGE_MAX = "threshold", "is_signed", "range_min", "range_max"
LUT_VALUES, SCALE_PER_CHANNEL = "lut_values", "scale_per_channel"
MIN_THRESHOLD = 2.0**-16
