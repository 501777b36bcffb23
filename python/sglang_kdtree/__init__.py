# SPDX-License-Identifier: Apache-2.0
"""SGLang's kdtree extension: the attention backend `kdtree_mla`."""
