"""For hooks on every forward: which one is the training's own."""

OUTERMOST = r"""
import sys

def outermost():
    # Of a hook: whether its module is what a strategy calls in a step, wrapped as it is; not a part of it, and not in
    # an evaluation.
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("inner", "_call_impl", "_wrapped_call_impl"):
        frame = frame.f_back
    return frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("jobs/parallel/base.py")
"""
