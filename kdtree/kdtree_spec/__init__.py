# SPDX-License-Identifier: Apache-2.0
"""Draft trees for speculative decoding: the reference implementations that everything else is compared with."""

__version__ = "0.1.0"
