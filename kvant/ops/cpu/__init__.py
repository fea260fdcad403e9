"""Operations for CPUs, written in C (native/) and compiled when kvant is installed. Every module here registers its operation."""

from kvant.spec import discover

discover(__name__)
