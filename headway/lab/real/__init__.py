"""What the lab does with a loaded model: workloads in real time, profiles, prompts from files."""
