"""The task: write the letters of a made-up word in alphabetical order, ``batoki=abikot.``."""

from __future__ import annotations

import torch
from torch import Tensor

SYLLABLES = 3
CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
ASK, END = "=", "."
ALPHABET = [*sorted(CONSONANTS + VOWELS), ASK, END]
NUMBER = {letter: number for number, letter in enumerate(ALPHABET)}

PROMPT_LENGTH = 2 * SYLLABLES + len(ASK)
ANSWER_LENGTH = 2 * SYLLABLES + len(END)


def encode(text: str) -> list[int]:
    return [NUMBER[letter] for letter in text]


def decode(tokens: Tensor) -> str:
    return "".join(ALPHABET[number] for number in tokens.tolist())


def words(count: int, generator: torch.Generator) -> list[str]:
    """Pronounceable words of consonant-vowel syllables."""

    def pick(letters: str) -> list[int]:
        return torch.randint(len(letters), (count, SYLLABLES), generator=generator).tolist()

    pairs = zip(pick(CONSONANTS), pick(VOWELS), strict=True)
    return ["".join(CONSONANTS[c] + VOWELS[v] for c, v in zip(*pair, strict=True)) for pair in pairs]


def prompts(count: int, generator: torch.Generator) -> Tensor:
    return torch.tensor([encode(word + ASK) for word in words(count, generator)])


def solution(word: str) -> str:
    return "".join(sorted(word)) + END


def demonstrations(count: int, noise: float, generator: torch.Generator) -> Tensor:
    """Prompts with answers for the supervised warm start; a share ``noise`` of the answers' letters is random."""
    tokens = torch.tensor([encode(word + ASK + solution(word)) for word in words(count, generator)])
    answers = tokens[:, PROMPT_LENGTH:]
    wrong = torch.rand(answers.shape, generator=generator) < noise
    answers[wrong] = torch.randint(len(ALPHABET), (int(wrong.sum()),), generator=generator)
    return tokens


def score(prompt: str, answer: str) -> float:
    """The reward, 0 to 1: the share of places that hold the right letter, the end sign included."""
    wanted = solution(prompt.removesuffix(ASK))
    written, end, _ = answer.partition(END)
    written += end
    right = sum(a == b for a, b in zip(written, wanted, strict=False))
    return right / max(len(written), len(wanted))
