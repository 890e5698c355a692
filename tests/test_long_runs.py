"""The campaign sees memory that grows along a run, or with the number of problems."""

from benchmarks.campaign import long_runs


def test_what_grows_is_counted_as_lost(monkeypatch):
    grown = {"steps": [[5, 100 + 10 * n] for n in range(20)], "problems": [[5, 100 * n] for n in range(1, 9)]}
    monkeypatch.setattr(long_runs, "answer", lambda what, *_: grown[what])
    assert long_runs.long_run(1, 1).lost > 0 and long_runs.many_problems(8, 4, 1.15).lost > 0
    monkeypatch.setattr(long_runs, "answer", lambda *_: [[40_000, 100]] * 8)
    assert long_runs.many_problems(8, 4, 1.15).lost == 8
