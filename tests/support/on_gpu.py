"""A plugin of pytest (``-p support.on_gpu``): what the tests train on the CPU in one process is trained on a GPU."""

import functools

import pytest
import torch
from lightning.pytorch import Trainer

# They make CPU tensors beside the batch, read its memory, or count on the bits, kernels, draws or times of a CPU.
NAMES = """
test_pseudo_labels_of_the_network test_front_is_changed_once test_running_statistics_are_recomputed
test_weights_are_swapped_for_validation test_change_of_some_batches test_same_change_of_each_batch test_transfer_hooks
test_training_step_with_an_iterator test_sampler_that_follows_the_losses test_sparse_tensor_in_a_layer
test_batches_of_other_lengths_use_the_same_entries test_deeper_boundary_without_positions_uses_whole_entries
test_layers_that_look_at_the_padding_get_their_own test_positions_are_no_samples_where_there_are_as_many
test_front_that_carries_a_state test_network test_module_is_copied_in_the_middle test_image_is_logged_at_each_epoch
test_input_is_changed_in_place test_input_is_read_around_the_network test_input_is_read_now_and_then
test_network_twice_in_each_step test_validation_step_calls_the_training_step test_validation_within_the_step
test_validation_step test_behind_hooks_for_batches_samples_are_those_of_the_hooks
test_a_resumed_reference_has_more_than_the_weights test_an_encoder_and_decoder_with_padding
test_a_second_fit_of_everything_starts_with_nothing_frozen test_a_trial_leaves_no_trace
test_halves_have_the_gradients_of_their_samples test_a_resumed_run_draws_and_counts_the_same
test_mixed_precision_and_an_object_of_a_loss test_stale_losses_belong_to_their_samples
test_an_error_in_a_branch_leaves_the_run_as_it_was test_a_run_with_rehearsals_is_the_run_without
test_a_plateau_scheduler_is_told_or_refused test_nobody_else_sees_a_trial
test_evaluations_do_not_change_training_nor_compile_anew test_padding_is_read test_texts_of_several_lengths
test_attention_is_as_fast_as_while_it_learned test_what_cannot_change_is_refused
test_a_batch_that_is_skipped_scores_the_next test_the_winner_ends_where_a_run_with_its_setting_does
test_suffixes_go_on_behind_a_search_whose_steps_are_whole test_turns_without_the_cache_change_nothing
test_one_setting_trains_bit_for_bit_as_without test_nothing_trains_under_no_grad test_three_ranks_train_as_one_process
"""
ON_CPU = frozenset(NAMES.split())


@pytest.fixture(autouse=True)
def _on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request.node, "originalname", None) in ON_CPU or "a compiled forward" in request.node.name:
        return
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    original = Trainer.__init__

    @functools.wraps(original)
    def on_gpu(self, *args, **options):
        asked = (options.get("accelerator", "auto"), options.get("devices", 1), options.get("strategy", "auto"))
        if not args and asked[0] in ("cpu", "auto") and asked[1] in (1, "auto") and asked[2] == "auto":
            options |= {"accelerator": "gpu", "devices": 1}
        original(self, *args, **options)

    monkeypatch.setattr(Trainer, "__init__", on_gpu)
