"""A runtime in a process of its own: one that crashes, hangs or prints does no harm to the user's process.

The child runs a script beside this module, which answers pickled requests on its standard input one by one; whatever
the runtime prints goes to a file, from which error messages quote.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import IO, Any

from chipfit.errors import RuntimeUnavailable

_QUOTED_LINES = 4  #: number of the last printed lines that an error message quotes


class Child:
    """A child process with a runtime.

    Args:
        script: name of the script in this folder, or a path.
        name: of the runtime, for messages.
        limit_s: time for one answer [s].
        unquoted: text in printed lines that say nothing to the reader of an error; "" if all are quoted.
        path: of the file that it runs, for messages.
    """

    def __init__(self, script: str, name: str, limit_s: float = 120.0, unquoted: str = "", path: str = "") -> None:
        self.name, self.limit_s, self.unquoted, self.path = name, limit_s, unquoted, path
        self._printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by `_end`
        self._before = 0  #: size of what was printed before the last request
        # -P: the modules beside the script have names of packages
        command = [sys.executable, "-P", str(Path(__file__).parent / script)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed)
        self.close = weakref.finalize(self, _end, self.process, self._printed)

    def ask(self, function: str, *args: Any) -> Any:
        """Call a function of the script.

        Raises:
            RuntimeUnavailable: the function raises an error, the process ends, or it gives no answer in time.
        """
        process, self._before = self.process, self._printed.seek(0, os.SEEK_END)
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.limit_s, stop)
        timer.start()
        try:
            pickle.dump((function, args), process.stdin, protocol=5)
            process.stdin.flush()
            error, answer = pickle.load(process.stdout)
        except Exception as e:  # bytes that are no answer may raise any error
            words = self._last_words()
            what = f"gave no answer within {self.limit_s:g} s" if late.is_set() else self._end_of_process()
            raise RuntimeUnavailable(f"{self.name} {what}{words and f' ({words})'}", where=self.path) from e
        finally:
            timer.cancel()
        if error:
            raise RuntimeUnavailable(f"{self.name}: {self._last_words() or error}", where=self.path)
        return answer

    def _end_of_process(self) -> str:
        """Wait for a process that gave no answer, and return how it ended; end one that goes on."""
        try:
            code = self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return "gave an answer that cannot be read"
        return f"ended with code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"

    def printed(self) -> str:
        """Return what the runtime has printed since the last request began."""
        self._printed.seek(self._before)
        return self._printed.read().decode(errors="replace")

    def _last_words(self) -> str:
        lines = list(dict.fromkeys(line.strip() for line in self.printed().splitlines() if line.strip()))
        said = [line for line in lines if not self.unquoted or self.unquoted not in line]
        return "; ".join(said[-_QUOTED_LINES:])


def _end(process: subprocess.Popen[bytes], printed: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, printed):
        if stream is not None:
            with contextlib.suppress(OSError):  # the process may have ended with a request in the pipe
                stream.close()
