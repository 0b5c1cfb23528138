"""Where the parts of a run live on this machine, and with how many threads."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.runtime.cpu import threads_for_half, threads_per_rank, usable_cores


@dataclass(frozen=True)
class Home:
    """Where one part of a run lives."""

    part: str
    place: str
    """By default."""
    elsewhere: str
    """The setting with which it lives elsewhere; empty if there is none."""
    threads: str

    def as_object(self) -> dict[str, str]:
        """For programs."""
        return asdict(self)


def where_it_runs() -> tuple[Home, ...]:
    """The parts of a run, in the order in which a prompt passes them."""
    cores = usable_cores()
    return (
        Home("controller", "the run's process, on its event loop", "", "1"),
        Home(
            "engine ranks",
            "a thread of the run's process each",
            "runtime.engine_process: true gives each rank its own process",
            f"{threads_per_rank(0, ranks=1)} of {cores} cores for all rollout.engine.ranks together",
        ),
        Home("rewards", "processes", "rollout.environment.in_process: true keeps them in the run's process", "1 each"),
        Home(
            "trainer",
            "a thread of the run's process",
            "runtime.trainer_process: true, with data_plane.adapter: shm, gives it its own process",
            f"{threads_for_half(0)} of {cores} cores",
        ),
        Home(
            "row worker",
            "a thread of the run's process",
            "data_plane.adapter: shm gives it its own process",
            "1",
        ),
    )
