/* SPDX-License-Identifier: Apache-2.0
 * An empty Python module: importing it loads the library, whose static initialisers register the ops.
 * It keeps to the limited API, so one library serves every CPython from 3.10 on. */
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "common_ops",
    .m_doc = "CPU ops of torch.ops.sgl_kernel.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit_common_ops(void) { return PyModule_Create(&module); }
