"""The models beside the policy: reference, teachers, critic."""
