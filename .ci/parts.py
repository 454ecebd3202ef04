"""The parts of `.ci/run`, which every change must pass.

Parts run one after the other, also after one that fails. The last lines are a table: how long each part took, how much
time of the CPU and memory in its largest process it needed, and what it said in the end. `.ci/run NAME...` runs some.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

PARTS = ("lint", "test", "docs", "test-thorough", "test-avx2", "test-peers", "test-versions", "dist")
# How pytest, pyright and the script of the versions close.
CLOSING = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).* in \d.*?|\d+ errors?, .*|Ran .*)(?: =+)?$")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run(part):
    """Whether a part has passed, and its line of the table. What it prints is printed, and read for its last words."""
    began, said = time.monotonic(), []
    made = subprocess.Popen(["make", part], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in made.stdout:
        print(line, end="", flush=True)
        said += CLOSING.findall(COLOURS.sub("", line))
    _, status, used = os.wait4(made.pid, 0)
    costs = minutes(time.monotonic() - began), minutes(used.ru_utime + used.ru_stime), f"{used.ru_maxrss // 1024}"
    return status == 0, (part, *costs, "; ".join(said) or ("done" if status == 0 else "failed"))


def minutes(seconds):
    """Seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main(parts):
    """Runs the parts and prints the table; gives the status of the process."""
    os.chdir(Path(__file__).resolve().parents[1])
    began, rows, failed = time.monotonic(), [], []
    for part in parts:
        passed, row = run(part)
        rows.append(row)
        failed += [] if passed else [f"make {part}"]
    print(f"\n{'part':14} {'minutes':>8} {'CPU':>8} {'MiB':>6}  it said")
    for row in rows:
        print("{:14} {:>8} {:>8} {:>6}  {}".format(*row))
    print(f"{'in all':14} {minutes(time.monotonic() - began):>8}  {', '.join(failed) or 'nothing'} failed.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PARTS))
