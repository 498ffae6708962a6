"""Trained networks of package indexes and public repositories, from file to verified integers by the command line.

    python -m benchmarks.gallery [--only NAME ...] [--platform NAME ...] [--repositories FOLDER]

`networks.yaml` names files, licences, inputs and metrics. Files are downloaded into `gallery/`, which git ignores:
packages by `pip download`, repositories by `git clone`, or read from git directories `FOLDER/OWNER+NAME/repo`.
"""
