// What Python sees of page codecs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "arrays.h"
#include "page_codec.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagetrie {

namespace {

struct NamedCodec : PageCodec {
  std::string name;
};

NamedCodec* make_codec(const std::string& name, const std::string& dtype, int n_layers, int n_kv_heads, int head_dim,
                       int page_size) {
  if (name != "int8" && name != "k8v4") throw nb::value_error(("codec must be int8 or k8v4, got " + name).c_str());
  if (dtype != "fp16" && dtype != "fp32") throw nb::value_error(("dtype must be fp16 or fp32, got " + dtype).c_str());
  for (int size : {n_layers, n_kv_heads, head_dim, page_size})
    if (size < 1 || size > 1 << 16)
      throw nb::value_error(("sizes must be from 1 to 65536, got " + std::to_string(size)).c_str());
  const CodecShape shape{dtype == "fp16" ? KvType::fp16 : KvType::fp32, head_dim, page_size};
  return new NamedCodec{{shape, n_layers, n_kv_heads, name == "int8" ? 8 : 4}, name};
}

// The bytes of a contiguous uint8 vector of that many, whose address is a multiple of `alignment`.
char* bytes_of(const char* name, const Array& array, size_t count, size_t alignment) {
  if (array.ndim() != 1 || array.dtype() != nb::dtype<uint8_t>() || !contiguous_from(array, 0) ||
      array.shape(0) != count)
    refuse(name, "contiguous uint8 [" + std::to_string(count) + "]", array);
  if (reinterpret_cast<uintptr_t>(array.data()) % alignment)
    throw nb::value_error((std::string(name) + " must be aligned to " + std::to_string(alignment) + " bytes").c_str());
  return static_cast<char*>(array.data());
}

size_t alignment_of(const PageCodec& codec) { return codec.shape.type == KvType::fp16 ? 2 : 4; }

bool encode(const NamedCodec& codec, const Array& src, const Array& out) {
  const char* from = bytes_of("src", src, codec.page_bytes(), alignment_of(codec));
  char* to = bytes_of("out", out, codec.encoded_bytes(), 1);
  const nb::gil_scoped_release release;
  return codec.encode(from, to);
}

void decode(const NamedCodec& codec, const Array& src, const Array& out) {
  const char* from = bytes_of("src", src, codec.encoded_bytes(), 1);
  char* to = bytes_of("out", out, codec.page_bytes(), alignment_of(codec));
  const nb::gil_scoped_release release;
  codec.decode(from, to);
}

}  // namespace

void bind_page_codec(nb::module_& m) {
  nb::class_<NamedCodec>(m, "PageCodec", "Pages in fewer bytes: 8 or 4 bits per value, with their scales.")
      .def(nb::new_(&make_codec), "name"_a, "dtype"_a, "n_layers"_a, "n_kv_heads"_a, "head_dim"_a, "page_size"_a)
      .def_ro("name", &NamedCodec::name)
      .def_prop_ro("page_bytes", &NamedCodec::page_bytes, "Bytes of a page.")
      .def_prop_ro("encoded_bytes", &NamedCodec::encoded_bytes, "Bytes of an encoded page.")
      .def("encode", &encode, "src"_a.noconvert(), "out"_a.noconvert(),
           "Encode a page; False, with out of no use, if it holds NaN, infinity or more than 2^120.")
      .def("decode", &decode, "src"_a.noconvert(), "out"_a.noconvert(), "Decode a page.");
}

}  // namespace pagetrie
