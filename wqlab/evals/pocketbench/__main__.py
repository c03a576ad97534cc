"""Print what fixes this generator, as data/pocketbench.json holds it: ``python -m wqlab.evals.pocketbench``."""

from wqlab.evals.pocketbench import FIRST_TEST_SEED, VERSION, generator_hash, task_names
from wqlab.records import dump_json

print(
    dump_json({"version": VERSION, "sha256": generator_hash(), "first_test_seed": FIRST_TEST_SEED, "tasks": task_names()}), end=""
)
