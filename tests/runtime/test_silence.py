from __future__ import annotations

from penstock.runtime.silence import Silence


def test_silence_adds_up_until_something_is_heard() -> None:
    silence = Silence(longest_tick=1.0)
    assert [silence.tick(0.5) for _ in range(3)] == [0.5, 1.0, 1.5]
    silence.heard()
    assert silence.seconds == 0.0
    assert silence.tick(0.5) == 0.5


def test_time_in_which_the_listener_did_not_run_is_nobodys_silence() -> None:
    silence = Silence(longest_tick=1.0)
    assert silence.tick(100.0) == 1.0
