"""Some calls are not watched."""

import torch
from torch.overrides import TorchFunctionMode, has_torch_function_variadic

from lightning_egeria.core.batches.onlookers import Onlooker, unwatched


class Seeing:
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), func]
        return func(*args, **(kwargs or {}))


class Watch(Seeing, Onlooker):
    pass


class Users(Seeing, TorchFunctionMode):
    pass


def test_an_onlooker_does_not_see_the_call():
    with Watch() as watch:
        assert type(unwatched(torch.zeros, 2)) is torch.Tensor
        torch.ones(2)
    assert watch.seen == [torch.ones]


def test_the_users_own_mode_sees_it():
    with Users() as mode:
        unwatched(torch.ones, 2)
        assert unwatched(has_torch_function_variadic, torch.ones(1))
    assert mode.seen[0] is torch.ones
