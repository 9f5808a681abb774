"""The names of the policies."""

from lightning_egeria.cluster.policies import POLICIES


def test_each_policy_is_new_and_knows_its_name():
    for name, policy in POLICIES.items():
        assert policy().name == name
        assert policy() is not policy()
    assert POLICIES.keys() == {"pollux", "tiresias", "optimus", "fcfs", "backfill", "srtf"}
