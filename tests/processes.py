"""Python processes that tests start: forks of one that has imported PyTorch, which takes two seconds.

done = python("import chipfit; print(chipfit.__version__)")  # as `python -c` would
assert (done.returncode, done.stdout) == (0, "1.0.0\n")
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

#: other packages that chipfit imports: the forks have them, and nothing of chipfit
PACKAGES = "torch numpy pydantic yaml scipy.optimize safetensors.torch jinja2 rich.console typer"
#: begins programs that load Keras, which takes four seconds where it finds these packages
LEAN = "import sys; sys.modules |= dict.fromkeys(['jax', 'sklearn', 'matplotlib'])\n"
#: forks itself for each line of its input, and prints the exit status; the fork leaves the loop and runs the program
SERVER = """
import atexit, gc, json, os, runpy, sys, traceback
for package in sys.argv[1:]:
    __import__(package)
gc.freeze()
for line in sys.stdin:
    asked, child = json.loads(line), os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in ((1, "stdout"), (2, "stderr")):
    os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(asked["env"])
os.chdir(asked["cwd"])
sys.argv = asked["argv"]
status = 0
try:
    if asked["code"].startswith("-m "):
        runpy.run_module(asked["code"][3:], run_name="__main__", alter_sys=True)
    else:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as e:
    status = e.code or 0
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
except BaseException:
    traceback.print_exc()
    status = 1
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # without tearing PyTorch down, which takes half a second
"""


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *PACKAGES.split()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def python(code: str, *words: object, cwd: str | Path = ".", **env: str | None) -> subprocess.CompletedProcess[str]:
    """Run a program, or a module if it begins with "-m ", in a process of its own, and return what it ends with.

    Args:
        words: `sys.argv[1:]`.
        env: changes of the environment; None removes a variable. Those that Python or PyTorch reads when it starts
            have no effect.
    """
    server, given = _server(), {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    with TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
        asked = {
            **files,
            "code": code,
            "argv": ["-c", *map(str, words)],
            "env": given,
            "cwd": os.path.abspath(str(cwd)),
        }
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, status, *(Path(f).read_text() for f in files.values()))
