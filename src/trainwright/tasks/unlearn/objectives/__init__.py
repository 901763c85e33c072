"""The forget losses, one formula each, by the model output they use. specs.py lists their inputs.

pi is the trained model and pi_ref the reference, x a question and y its answer with |y| tokens.
"""
