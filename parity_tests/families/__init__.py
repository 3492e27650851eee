"""Five small code bases in plain PyTorch: what docs/reference/families.md translates.

Each file stands for code from elsewhere: it imports only torch, keeps that code's names,
conventions and state-dict keys, and knows nothing of this project.
"""
