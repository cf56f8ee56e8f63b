"""Where a plan runs. One file per place, four verbs each."""
