"""A server in a process of its own answers requests, and prints errors alone if it is silent."""

import os
import pickle
import subprocess
import sys

SERVER = """
from chipfit.runtimes.serve import serve
class Server:
    def run(self, x):
        print("a library about itself", flush=True)
        return 1 / x
serve(Server(), silent=True)
"""


def test_a_silent_server_answers_and_prints_each_error_at_once():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdin=-1, stdout=-1, stderr=-1) as child:

        def answer(x):
            pickle.dump(("run", (x,)), child.stdin)
            child.stdin.flush()
            return pickle.load(child.stdout)

        assert answer(2) == ("", 0.5)
        assert answer(0) == ("ZeroDivisionError: division by zero", None)
        os.set_blocking(child.stderr.fileno(), False)
        assert child.stderr.read() == b"ZeroDivisionError: division by zero\n"
        child.stdin.close()
    assert child.returncode == 0
