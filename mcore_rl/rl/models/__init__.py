"""Models other than the policy: reference, teachers, critic."""
