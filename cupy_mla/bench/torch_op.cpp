// Compiled torch operations that launch a kernel: what a call costs the host in the way in which
// libraries with a build step do it. They check what such operations check, fill in the addresses
// in the kernel's argument and launch on torch's current stream.
//
//   insert           the least that such an operation can be: three tensors and numbers
//   insert_grouped   with the arguments and the checks of the published grouped operation

#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

namespace {

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);

Launch find_launch() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(driver != nullptr, "insert: the NVIDIA driver must be installed");
  return reinterpret_cast<Launch>(dlsym(driver, "cuLaunchKernel"));
}

constexpr std::size_t kMostBytes = 4096;

// `arguments` is the kernel's structure in host memory; it begins with three times an address and
// two strides: of kv_c, k_pe and slots.
void insert(const at::Tensor& kv_c, const at::Tensor& k_pe, const at::Tensor& slots,
            const at::Tensor& arguments, std::int64_t function, std::int64_t grid,
            std::int64_t block_x, std::int64_t block_y) {
  TORCH_CHECK(kv_c.dim() == 3 && k_pe.dim() == 3, "insert: rows must have 3 dimensions");
  TORCH_CHECK(kv_c.size(0) == k_pe.size(0) && kv_c.size(1) == k_pe.size(1),
              "insert: kv_c and k_pe must have as many rows");
  TORCH_CHECK(slots.size(-1) <= kv_c.size(1), "insert: there must be a row for each slot");
  TORCH_CHECK(kv_c.scalar_type() == k_pe.scalar_type(), "insert: rows must have one dtype");
  TORCH_CHECK(slots.scalar_type() == at::kLong, "insert: slots must be int64");
  TORCH_CHECK(kv_c.stride(2) == 1 && k_pe.stride(2) == 1, "insert: the last stride must be 1");
  TORCH_CHECK(kv_c.device() == k_pe.device() && kv_c.device() == slots.device(),
              "insert: arrays must be on the same device");
  const std::size_t bytes = arguments.nbytes();
  TORCH_CHECK(arguments.device().is_cpu() && bytes <= kMostBytes,
              "insert: arguments must be a structure in host memory");

  alignas(16) char structure[kMostBytes];
  std::memcpy(structure, arguments.const_data_ptr(), bytes);
  const auto fill = [&](int index, const at::Tensor& rows, std::int64_t layer, std::int64_t token) {
    const std::int64_t size = rows.element_size();
    const std::int64_t members[3] = {reinterpret_cast<std::int64_t>(rows.const_data_ptr()),
                                     layer * size, token * size};
    std::memcpy(structure + index * sizeof(members), members, sizeof(members));
  };
  fill(0, kv_c, kv_c.stride(0), kv_c.stride(1));
  fill(1, k_pe, k_pe.stride(0), k_pe.stride(1));
  fill(2, slots, slots.dim() == 2 ? slots.stride(0) : 0, slots.stride(-1));

  static const Launch launch = find_launch();
  const c10::impl::VirtualGuardImpl device(kv_c.device().type());
  void* stream = device.getStream(kv_c.device()).native_handle();
  void* pointers[1] = {structure};
  const int failed = launch(reinterpret_cast<void*>(function), static_cast<unsigned>(grid), 1, 1,
                            static_cast<unsigned>(block_x), static_cast<unsigned>(block_y), 1, 0,
                            stream, pointers, nullptr);
  TORCH_CHECK(failed == 0, "insert: cuLaunchKernel failed with error ", failed);
}

// What `insert_grouped` launches; a published operation has its kernels compiled in.
struct Recorded {
  at::Tensor arguments;
  std::int64_t function, grid, block_x, block_y;
};

Recorded& recorded() {
  static Recorded launch;
  return launch;
}

void record(const at::Tensor& arguments, std::int64_t function, std::int64_t grid,
            std::int64_t block_x, std::int64_t block_y) {
  recorded() = {arguments, function, grid, block_x, block_y};
}

void insert_grouped(const at::Tensor& kv_c, const at::Tensor& k_pe, const at::Tensor& cache_ptrs,
                    const at::Tensor& slots, std::int64_t block_size, std::int64_t block_stride,
                    std::int64_t entry_stride, const std::string& kv_cache_dtype,
                    const std::optional<at::Tensor>& scales) {
  TORCH_CHECK(kv_c.dim() == 3 && k_pe.dim() == 3, "insert_grouped: rows must have 3 dimensions");
  TORCH_CHECK(cache_ptrs.dim() == 1 && cache_ptrs.size(0) == kv_c.size(0),
              "insert_grouped: there must be a cache for each layer");
  TORCH_CHECK(cache_ptrs.scalar_type() == at::kLong && cache_ptrs.is_contiguous(),
              "insert_grouped: kv_cache_ptrs must be int64 and contiguous");
  TORCH_CHECK(cache_ptrs.device() == kv_c.device(),
              "insert_grouped: kv_cache_ptrs must be on the same device as kv_c");
  TORCH_CHECK(block_size > 0 && block_stride >= block_size * entry_stride,
              "insert_grouped: blocks must not overlap");
  TORCH_CHECK(entry_stride >= kv_c.size(2) + k_pe.size(2), "insert_grouped: rows must not overlap");
  if (kv_cache_dtype != "auto") {
    TORCH_CHECK(
        kv_cache_dtype == "fp8" || kv_cache_dtype == "fp8_e4m3" || kv_cache_dtype == "fp8_e5m2",
        "insert_grouped: kv_cache_dtype must be known, got ", kv_cache_dtype);
    TORCH_CHECK(scales.has_value() && scales->scalar_type() == at::kFloat &&
                    scales->size(0) == kv_c.size(0) && scales->is_contiguous() &&
                    scales->device() == kv_c.device(),
                "insert_grouped: kv_scales must be float32, one a layer, on the same device");
  }
  const c10::impl::VirtualGuardImpl guard(kv_c.device().type());
  const c10::Device before = guard.exchangeDevice(kv_c.device());
  const Recorded& launch = recorded();
  insert(kv_c, k_pe, slots, launch.arguments, launch.function, launch.grid, launch.block_x,
         launch.block_y);
  guard.uncheckedSetDevice(before);
}

}  // namespace

TORCH_LIBRARY(cupy_mla_bench, library) {
  library.def(
      "insert(Tensor kv_c, Tensor k_pe, Tensor slots, Tensor arguments, int function, int grid, "
      "int block_x, int block_y) -> ()");
  library.impl("insert", c10::DispatchKey::CompositeExplicitAutograd, &insert);
  library.def("record(Tensor arguments, int function, int grid, int block_x, int block_y) -> ()");
  library.impl("record", c10::DispatchKey::CompositeExplicitAutograd, &record);
  library.def(
      "insert_grouped(Tensor kv_c, Tensor k_pe, Tensor kv_cache_ptrs, Tensor slot_mapping, "
      "int block_size, int block_stride, int entry_stride, str kv_cache_dtype, "
      "Tensor? kv_scales) -> ()");
  library.impl("insert_grouped", c10::DispatchKey::CompositeExplicitAutograd, &insert_grouped);
}
