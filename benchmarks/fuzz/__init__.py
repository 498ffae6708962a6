"""Draw bad input at random, and check that it ends in a result that makes sense or in an error that says what to do.

    python -m benchmarks.fuzz --seed 7 --cases 10000 --minutes 60
    python -m benchmarks.fuzz --seed 7 --cases 10000 --part 2/2 --first 700  # half of them, from its case 700 on
    python -m benchmarks.fuzz --seed 7 --only saved:1234        # one case again, with what was drawn and the traceback

Kinds of input: saved results, calls with wrong operands in them, platform files, chips described in Python,
calibration data, model files, networks in `.onnx` and `.tflite` files, command lines.
`memory.py` probes operators for reads and writes outside of tensors.
A failure is

    untyped    an exception that is not a ChipfitError, or a ChipfitError caused by an unforeseen exception
    hang       a case that takes longer than its limit
    died       a crash of the process
    nonsense   an impossible value was accepted: NaN, a scale that is not positive, a zero point outside its grid

The exit status is 1 if there is any failure.
"""
