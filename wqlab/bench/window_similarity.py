"""Calibration: similarity of windows of real prose to questions about it (WindowQuant, Eq. 8), in SmolLM2's embedding space.

A proxy: the paper's windows hold visual tokens. Text windows and questions share the embedding space in the same way, as input
embeddings of the language model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqlab.bench import Bench
from wqlab.registry import register

if TYPE_CHECKING:
    import pandas as pd

#: Asked of Python's own documentation, which is the prose.
QUESTIONS = (
    "How does an assert statement behave when optimization is requested?",
    "What is the difference between a for loop's else clause and a while loop's?",
    "When is a class's __del__ method called?",
    "How are keyword arguments matched to the parameters of a function?",
    "What happens to the loop variable after a for statement ends?",
    "Which objects can be used as keys of a dictionary?",
    "How does the with statement treat an exception that is raised in its body?",
    "What does the import statement do when a module was already loaded?",
)


@register("bench", "window_similarity")
class WindowSimilarityBench(Bench):
    """Writes the similarity distribution that `alpha_sweep` reads."""

    name = "window_similarity"
    description = "similarity (Eq. 8) of 32-token windows of prose to eight questions, in SmolLM2's embeddings (not a timing)"
    uses_gpu = False
    columns = {  # noqa: RUF012
        "model": "catalogue name",
        "window_size": "tokens per window",
        "question": "number of the question, from 0",
        "window": "window of the prose, from 0",
        "similarity": "mean pairwise cosine of token embeddings (Eq. 8)",
    }

    def measure(self, quick: bool = False) -> pd.DataFrame:
        """Return one row per question and window."""
        import pandas as pd
        import torch

        from wqlab.models import load
        from wqlab.models.prose import prose
        from wqlab.windows.similarity import window_similarity

        window_size = 32
        loaded = load("smollm2")
        ids, _ = prose(loaded.tokenizer, 512 if quick else 4096)
        embed = loaded.model.get_input_embeddings()
        rows = []
        with torch.inference_mode():
            tokens = embed(ids[0])
            for number, question in enumerate(QUESTIONS):
                text = embed(torch.tensor(loaded.tokenizer(question, add_special_tokens=False).input_ids))
                scores = window_similarity(text, tokens, window_size).tolist()
                rows += [("smollm2", window_size, number, w, score) for w, score in enumerate(scores)]
        return pd.DataFrame(rows, columns=list(self.columns))
