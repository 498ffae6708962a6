"""Preparation of images where no option changes it."""

SIDE = 224  #: side length [pixels]
#: mean and standard deviation of values in 0..1, per channel: those of ImageNet, as of most vision models
MEAN, STD = "0.485,0.456,0.406", "0.229,0.224,0.225"
