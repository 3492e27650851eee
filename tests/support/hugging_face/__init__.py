"""The model types of Hugging Face: what each is tried with, and the proof that all of them pass.

``cases``: the configurations, one file for a group of families. A new type adds its cases there,
two odd configurations or more, and ``proof`` does the rest. ``running`` builds tiny random models
of transformers and runs both sides in float64.
"""
