// Checks of arrays at the boundary to Python. Each names the array, what it must be and what it is.
#pragma once

#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace pagetrie {

using Array = nanobind::ndarray<nanobind::device::cpu>;

inline std::string describe(const Array& array) {
  const nanobind::dlpack::dtype type = array.dtype();
  const char* kinds[] = {"int", "uint", "float"};
  std::string text = (type.code < 3 ? kinds[type.code] : "type") + std::to_string(type.bits) + " [";
  for (size_t i = 0; i < array.ndim(); i++) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

[[noreturn]] inline void refuse(const char* name, const std::string& wanted, const Array& array) {
  throw nanobind::value_error((std::string(name) + " must be " + wanted + ", got " + describe(array)).c_str());
}

// Whether the elements from axis `first` on lie side by side in C order.
inline bool contiguous_from(const Array& array, size_t first) {
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > first;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

// The data of a contiguous int32 vector.
inline const int32_t* int32_vector(const char* name, const Array& array) {
  if (array.ndim() != 1 || array.dtype() != nanobind::dtype<int32_t>() || !contiguous_from(array, 0))
    refuse(name, "a contiguous vector of int32", array);
  return static_cast<const int32_t*>(array.data());
}

// A float32 [rows, a, b] whose rows may lie apart: the data and the distance between rows, in elements.
struct RowsOf {
  float* data;
  size_t stride;
};

inline RowsOf float_rows(const char* name, const Array& array, size_t rows, size_t a, size_t b) {
  const bool shaped = array.ndim() == 3 && array.shape(0) == rows && array.shape(1) == a && array.shape(2) == b;
  if (!shaped || array.dtype() != nanobind::dtype<float>() || !contiguous_from(array, 1) ||
      (rows > 1 && array.stride(0) < static_cast<int64_t>(a * b)))
    refuse(name, "float32 [" + std::to_string(rows) + ", " + std::to_string(a) + ", " + std::to_string(b) +
           "], the last two axes contiguous", array);
  return {static_cast<float*>(array.data()), rows > 1 ? static_cast<size_t>(array.stride(0)) : a * b};
}

}  // namespace pagetrie
