"""The loop of a child process: it answers the requests of `chipfit.runtimes.child`.

Scripts of children load this file by its path: their interpreter finds no module of this folder by its name.
"""

import os
import pickle
import sys
from typing import Any


def serve(server: Any, silent: bool = False) -> None:
    """Call methods of `server` as they are asked for, until the input ends.

    Args:
        silent: drop what the runtime prints, and print errors alone; a library that prints about itself hides them.
    """
    requests, answers, errors = (
        sys.stdin.buffer,
        os.fdopen(os.dup(1), "wb"),
        os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace"),
    )
    if silent:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
    os.dup2(2, 1)  # what the runtime prints must not disturb the answers
    while True:
        try:
            function, args = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = "", getattr(server, function)(*args)
        except Exception as e:  # any error of the runtime is an answer
            answer = f"{type(e).__name__}: {e}", None
            if silent:
                print(answer[0], file=errors, flush=True)
        sys.stdout.flush()
        pickle.dump(answer, answers, protocol=5)
        answers.flush()
