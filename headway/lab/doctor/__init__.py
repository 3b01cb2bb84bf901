"""The doctor: problems of a run, with the likely cause and a remedy, and trials of remedies."""
