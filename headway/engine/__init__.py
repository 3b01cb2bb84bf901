"""The loop around the scheduler, and what reads its reports."""
