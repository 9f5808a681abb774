"""Selection in several processes."""

import pytest
from lightning.pytorch.strategies import DDPStrategy
from models import images
from ranks import EXCHANGE_TIMEOUT, all_well, in_ranks
from selected import trained

from lightning_egeria.snapshots.digests import digest


def run_on_a_rank(mode):
    strategy = DDPStrategy(timeout=EXCHANGE_TIMEOUT)
    module, trainer, data = trained(images(150), epochs=4, mode=mode, devices=2, strategy=strategy)
    state = digest(dict(module.named_parameters()))
    sizes = [len(batch) for batch in module.ids]
    return state, trainer.global_step, sizes, sorted(map(tuple, module.ids[-3:])), data.selection.dropped


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queue", "in_batch"])
def test_two_ranks_train_in_step_on_their_own_samples(mode):
    (first, second) = all_well(in_ranks(2, run_on_a_rank, mode))
    assert first[:3] == second[:3]  # weights, steps and the sizes of all batches
    assert first[3] != second[3]
    assert first[2][:10] == [8] * 9 + [3]
    assert max(first[4], second[4]) <= (16 if mode == "queue" else 0) * 4
