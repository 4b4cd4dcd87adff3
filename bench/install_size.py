"""PF-12: how many packages the core install has, and their unpacked size without bytecode.

Installs this checkout into a fresh environment, as a user would, then counts. Baseline: numpy alone in its own
environment, the one large package that nothing here could do without.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.figures import Figure

ROOT = Path(__file__).parents[1]


def install(target: Path, *what: str) -> tuple[int, float]:
    """Packages and megabytes (10^6 bytes) of an environment that holds `what` and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)
    python = str(target / "bin/python")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    subprocess.run([*pip, "install", "--no-compile", *what], check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    site = next((target / "lib").glob("python3*/site-packages"))
    count = len(list(site.glob("*.dist-info")))
    size = sum(f.stat().st_size for f in site.rglob("*") if f.is_file() and f.suffix != ".pyc")
    return count, size / 1e6


def main() -> None:
    lock = ["-c", str(ROOT / "requirements/lock.txt")]
    with tempfile.TemporaryDirectory() as folder:
        packages, size = install(Path(folder, "core"), *lock, str(ROOT))
        base_packages, base_size = install(Path(folder, "base"), *lock, "numpy")
    Figure("PF-12", "core install, packages", packages, "packages", base_packages, "numpy alone", 35, 25).emit()
    Figure("PF-12", "core install, unpacked", size, "MB", base_size, "numpy alone", 110, 60).emit()


if __name__ == "__main__":
    main()
