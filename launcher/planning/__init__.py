"""From a recipe and the facts of a machine to a plan. Pure, but for the modules that probe.

Those are facts, codefacts, interpreters, machine and probes.
"""
