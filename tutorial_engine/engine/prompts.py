"""Introduced in notebook 02. What a caller may hand in as prompts, made into token ids and checked.

Knows texts, token ids and the tokenizer; knows no model, cache or queue.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

Prompt = str | Sequence[int]  # text needs a tokenizer


def prompt_token_ids(
    prompts: str | Sequence[Prompt], tokenizer: Tokenizer | None
) -> list[list[int]]:
    """Every prompt as token ids. ValueError for none, an empty one, or text without a tokenizer."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, int):
        raise ValueError(f"a prompt is a text or token ids, got the number {prompts}")
    if prompts is None or len(prompts) == 0:
        raise ValueError("no prompt given: pass a text, or a list of texts or token id lists")
    sequences = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError(f"prompt {i} is text: pass tokenizer=load_tokenizer(...) as well")
            prompt = tokenizer.encode(prompt).ids
        elif isinstance(prompt, int):
            raise ValueError(
                f"prompt {i} is the number {prompt}: pass a list of token id lists, [[1, 2, 3]]"
            )
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty: a prompt needs at least one token")
        sequences.append(list(prompt))
    return sequences


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """ValueError, naming it and the first bad one, for ids that are none of the vocabulary's."""
    for token in token_ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}; token ids are whole numbers from 0 to "
                f"{vocab_size - 1} (of a tensor: .tolist()). Was the text tokenized for another "
                "model?"
            )
