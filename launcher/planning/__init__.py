"""From a recipe and the facts of a machine to a plan. Pure, but for facts."""
