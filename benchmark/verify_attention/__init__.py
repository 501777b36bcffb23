# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_verify_attention.py: the problems, what is timed on each device, and the GPU's measured ceilings."""
