"""Correctors: coding with an eye on the queries. Every module here is found because it exists."""

from kvant.correctors.base import Corrector, Progress
from kvant.spec import discover

__all__ = ["Corrector", "Progress"]

discover(__name__)
