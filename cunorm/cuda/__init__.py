"""The host half of the CUDA kernels: choose, compile, pack, launch.

The walk of a call: `target` hands it to a planner (`row`), which asks `choices` for a launch,
`compiler` for the function that `sources` spells out, and `launch` to queue it.
"""
