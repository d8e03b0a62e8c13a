"""What every role of a Baton cluster agrees on: vocabulary, configuration, protocol, launch.

Nothing at this level imports torch; tensors live in `cluster.engine`, `cluster.kv` and `kernels` only.
"""
