"""All tests, in two processes side by side: `python -m testing`, and any options of pytest. In one
process: `python -m pytest`. The exit status is 0 if all have passed."""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from cli.settings import ROOT

# the slowest first; the last has what these leave of the paths in .pytest.ini
PARTS = [["course/test_course.py"], ["engine"], ["cli"], ["test_equivalence.py"],
         ["course/test_mark.py", "course/test_page.py"]]
PARTS.append([f"--deselect={path}" for part in PARTS for path in part])


def run(part: list[str]) -> int:
    """Run a part, and print what pytest reports once it has ended. Returns its exit status."""
    print("running:", *part, flush=True)
    words = [sys.executable, "-m", "pytest", *part, *sys.argv[1:]]
    ended = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(ended.stdout.decode(errors="replace"), flush=True)
    return ended.returncode


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as both:
        statuses = list(both.map(run, PARTS))
    sys.exit(int(any(statuses)))
