"""Who asks for a loader."""

from lightning.pytorch.loops.fetchers import _DataFetcher

from lightning_egeria.training.loops import is_asked_by_loop


class Fetcher(_DataFetcher):
    """A loop of Lightning, as far as a loader sees it."""

    def ask(self, function):
        return function()


def test_a_loop_is_told_from_all_others():
    assert Fetcher().ask(is_asked_by_loop)
    assert Fetcher().ask(lambda: [is_asked_by_loop() for _ in range(1)]) == [True]
    assert not is_asked_by_loop()
