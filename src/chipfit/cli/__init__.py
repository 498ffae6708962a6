"""The command line; `chipfit` and `python -m chipfit` start it."""

#: preparation of images where options do not change it: side length [pixels]; mean and standard deviation of values in
#: 0..1 per channel, those of ImageNet, on which most vision models were trained
SIDE, MEAN, STD = 224, "0.485,0.456,0.406", "0.229,0.224,0.225"


def main() -> None:
    """Run the command line."""
    from chipfit.cli.app import main as run

    run()
