"""The transformers rooms on the oldest release that is supported; the newest is what the other tests run on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = ("transformers==5.17.0", "huggingface-hub>=1.5,<2", "tokenizers<=0.23.1")
TESTS = ("tests/hf", "tests/evals", "tests/models", "tests/experiments/test_model_stems.py")


@pytest.mark.slow
def test_the_oldest_transformers(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), *OLDEST]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "5.17.0"
    line = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not browser and not gpu", *TESTS]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
