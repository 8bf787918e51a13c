// The module flashrope._build_info says how the CUDA extension was built. setup.py writes build_info.h.

#include <pybind11/pybind11.h>

#include "build_info.h"

PYBIND11_MODULE(_build_info, m) {
  m.attr("architectures") = FLASHROPE_ARCHITECTURES;
  m.attr("nvcc") = FLASHROPE_NVCC;
  m.attr("revision") = FLASHROPE_REVISION;
}
