"""A director's script and a worker, with nothing between them but the codec and a pair of pipes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

WORKER = """
import pickle, sys
from onehop._codec import decode, encode
source, sink = sys.stdin.buffer, sys.stdout.buffer
sys.stdout = sys.stderr
while True:
    try:
        stream, buffers = pickle.load(source)
    except EOFError:
        break
    function = args = None
    try:
        function, args = decode(stream, [memoryview(b) for b in buffers])
        reply = encode((True, function(*args)))
    except BaseException as error:
        reply = encode((False, repr(error)))
    pickle.dump((reply.stream, [bytearray(b) for b in reply.buffers]), sink)
    sink.flush()
    del function, args, reply
"""

DIRECTOR = """
import pickle, subprocess, sys
from onehop._codec import decode, encode
worker = subprocess.Popen([sys.executable, "worker.py"], stdin=-1, stdout=-1)
def call(function, *args):
    sent = encode((function, args))
    pickle.dump((sent.stream, [bytearray(b) for b in sent.buffers]), worker.stdin)
    worker.stdin.flush()
    stream, buffers = pickle.load(worker.stdout)
    good, value = decode(stream, [memoryview(b) for b in buffers])
    if not good:
        raise RuntimeError(value)
    return value
"""


def run_director(text: str, folder: Path) -> list[str]:
    """Run a script as `__main__`, with a worker in another process; its printed lines."""
    (folder / "worker.py").write_text(WORKER)
    script = folder / "script.py"
    script.write_text(
        DIRECTOR
        + textwrap.dedent(text)
        + "\nworker.stdin.close()\nworker.wait(20)\nworker.stdout.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()
