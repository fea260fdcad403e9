"""Tables of levels that codes are places in, as the kernels multiply them (codecs/levels.cuh)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

WEIGHT_ONE = 1 << 36  # what the weight of LevelKeys is written over
STEP_ONE = 1 << 30  # what the step of LevelValues is written over
CLOSE = 2.0**-13  # what a level as one byte may be off, over the largest level
STEPS = 512  # steps that are tried for the levels of values


class KeyLevels(NamedTuple):
    """Levels as bytes: level = weight (first + second / 128 - top / 256)."""

    top: int  # 128 times the largest first + second / 128
    first: tuple[int, ...]  # bytes, by code
    second: tuple[int, ...]  # empty where the first are close enough

    @property
    def parts(self) -> int:
        return 2 if self.second else 1

    def weight(self, levels: tuple[float, ...]) -> float:
        return 256 * levels[-1] / self.top

    def arguments(self, levels: tuple[float, ...]) -> str:
        """Arguments of the C++ type after the plane: of sixteen levels, those of a permutation of eight bytes each."""
        words = []
        for part in (self.first, self.second):
            row = bytes(part).ljust(16, b"\0")
            words += [f"{int.from_bytes(row[i : i + 4], 'little')}u" for i in range(0, 16, 4)]
        return f"{self.parts}, {self.top}, {round(WEIGHT_ONE * self.weight(levels))}, {', '.join(words)}"


@functools.lru_cache(maxsize=64)
def key_levels(levels: tuple[float, ...]) -> KeyLevels:
    """The levels of keys as bytes: as one where that is close enough. Of sixteen levels bytes are below 128."""
    largest, most = levels[-1], 127 if len(levels) > 8 else 255
    for top in range(most, most // 2, -1):
        whole = _whole(levels, top)
        if max(abs(2 * n / top - 1 - x / largest) for n, x in zip(whole, levels, strict=True)) < CLOSE:
            return KeyLevels(128 * top, whole, ())
    top = 128 * most + 127
    whole = _whole(levels, top)
    return KeyLevels(top, tuple(n >> 7 for n in whole), tuple(n & 127 for n in whole))


def _whole(levels: tuple[float, ...], top: int) -> tuple[int, ...]:
    """Levels as whole numbers from 0 to `top`, which mirror each other."""
    upper = [round((x / levels[-1] + 1) / 2 * top) for x in levels[len(levels) // 2 :]]
    return (*(top - n for n in reversed(upper)), *upper)


@functools.lru_cache(maxsize=64)
def value_levels(levels: tuple[float, ...]) -> tuple[int, list[int]]:
    """The positive levels of values as fp16 numbers, their bits, times a step over STEP_ONE: of some steps, that which leaves the
    smallest error. The largest number is between one and two."""
    upper = torch.tensor(levels[len(levels) // 2 :], dtype=torch.float64)
    steps = torch.arange(STEPS, 2 * STEPS, dtype=torch.float64) / (2 * STEPS) * upper[-1]
    steps = (steps * STEP_ONE).round() / STEP_ONE
    numbers = (upper / steps[:, None]).half()
    errors = (numbers.double() * steps[:, None] / upper - 1).abs().amax(1)
    best = int(errors.argmin())
    return round(float(steps[best]) * STEP_ONE), [bits & 0xFFFF for bits in numbers[best].view(torch.int16).tolist()]
