"""What the runs of a test of `egeria-train` are asked for, and what they leave."""

import json

SMALL = (
    "model.net.depth=8",
    "trainer=cpu",
    "trainer.max_epochs=1",
    "+trainer.limit_train_batches=4",
    "+trainer.limit_val_batches=1",
    "+trainer.enable_progress_bar=false",
    "data.batch_size=8",
)

# Freezes the first layer module after the second step.
SCRIPTED = (
    "~callbacks.freezing.policy",
    "+callbacks.freezing.policy={_target_: lightning_egeria.ScriptedPolicy, schedule: {2: 1}}",
    "callbacks.freezing.background=False",
)


def results(run_dir):
    return json.loads((run_dir / "savings.json").read_text())
