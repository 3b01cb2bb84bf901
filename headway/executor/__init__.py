"""What carries out a plan: a simulator here, devices beside it."""
